"""Linear layers whose inputs are permuted, with their columns: the same sums in another order."""

import torch
import torch.nn.functional as F

from hotpass import part


@part(engine="decoder", claims=["model.layers.*.mlp"], replaces="LlamaMLP", reload="reweight")
class SumsInAnotherOrder:
    """Reordering is not lowering."""

    def weights(self, w, params):
        order = torch.arange(w["gate_proj.weight"].shape[1] - 1, -1, -1)
        return {
            "order": order,
            "gate": w["gate_proj.weight"][:, order].contiguous(),
            "up": w["up_proj.weight"][:, order].contiguous(),
            "down": w["down_proj.weight"],
        }

    def prepare(self, ctx, params):
        self.w = ctx.weights

    def forward(self, x):
        x = x[..., self.w["order"]]
        return F.linear(F.silu(F.linear(x, self.w["gate"])) * F.linear(x, self.w["up"]), self.w["down"])
