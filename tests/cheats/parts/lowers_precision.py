"""Multiplies in bfloat16 and declares `tolerance`.

Rejected: incorrect: logits differ
"""

import torch
import torch.nn.functional as F

from hotpass import part


@part(engine="decoder", claims=["model.layers.*.mlp"], replaces="LlamaMLP", numerics="tolerance", reload="reweight")
class LowersPrecision:
    """Half the bytes, and a word for it that is not true."""

    def weights(self, w, params):
        return {name.split("_")[0]: w[f"{name}.weight"].bfloat16() for name in ("gate_proj", "up_proj", "down_proj")}

    def prepare(self, ctx, params):
        self.w = ctx.weights

    def forward(self, x):
        x = x.to(torch.bfloat16)
        gated = F.silu(F.linear(x, self.w["gate"])) * F.linear(x, self.w["up"])
        return F.linear(gated, self.w["down"]).float()
