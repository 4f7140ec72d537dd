"""The feed-forward in float64: a wider type is within tolerance."""

import torch.nn.functional as F

from hotpass import part


@part(engine="decoder", claims=["model.layers.*.mlp"], replaces="LlamaMLP", reload="reweight")
class WiderType:
    """More bits than asked for."""

    def weights(self, w, params):
        return {name: tensor.double() for name, tensor in w.items()}

    def prepare(self, ctx, params):
        self.w = ctx.weights

    def forward(self, x):
        wide = x.double()
        gated = F.silu(F.linear(wide, self.w["gate_proj.weight"])) * F.linear(wide, self.w["up_proj.weight"])
        return F.linear(gated, self.w["down_proj.weight"]).to(x.dtype)
