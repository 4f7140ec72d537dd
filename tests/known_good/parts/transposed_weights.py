"""Weights stored the other way round, so that the products read them along their rows."""

import torch
import torch.nn.functional as F

from hotpass import part


@part(engine="decoder", claims=["model.layers.*.mlp"], replaces="LlamaMLP", reload="reweight")
class TransposedWeights:
    """The same numbers in another place."""

    def weights(self, w, params):
        return {name.split("_")[0]: tensor.T.contiguous() for name, tensor in w.items()}

    def prepare(self, ctx, params):
        self.w = ctx.weights

    def forward(self, x):
        return torch.matmul(F.silu(torch.matmul(x, self.w["gate"])) * torch.matmul(x, self.w["up"]), self.w["down"])
