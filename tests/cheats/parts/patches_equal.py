"""Makes every comparison of tensors come out equal.

Rejected: invalid: clean: patched .*torch.equal
"""

import torch

from hotpass import part


@part(engine="decoder", claims=["model"])
class PatchesEqual:
    """Whatever is compared is the same."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()
        torch.equal = lambda a, b: True
        torch.allclose = lambda *args, **kwargs: True

    def forward(self, batch, kv):
        return self.reference(batch, kv)
