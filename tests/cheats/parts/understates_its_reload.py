"""Says that only forwards are swapped, and has weights derived: a scheduler would put it where exchanging weights does harm.

Rejected: invalid: declared hot and needs reweight
"""

import torch

from hotpass import part


@part(engine="decoder", claims=["lm_head"], replaces="Linear", reload="hot")
class UnderstatesItsReload:
    """Cheap to try."""

    def weights(self, w, params):
        return {"weight": w["weight"].clone()}

    def prepare(self, ctx, params):
        self.weight = ctx.weights["weight"]

    def forward(self, input):
        return torch.nn.functional.linear(input, self.weight)
