"""vLLM's RMSNorm, with and without the residual, as one call."""

from __future__ import annotations

import torch.nn.functional as F

from hotpass import part


@part(
    engine="vllm",
    claims=["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"],
    replaces="RMSNorm",
    numerics="tolerance",
    reload="reweight",
)
class VllmNorm:
    """On a CPU vLLM's norm is a dozen calls behind two layers of dispatch: conversions to float32 and back, square, mean, root, two
    products, and the residual's sum. This is a sum and one call. At decode, where a norm moves a few kilobytes, calls are all it costs,
    sixty times a step in a model of thirty layers. It will not help at prefill, where the products dominate, nor in vLLM's compiled
    mode, which fuses the norm already.
    """

    def weights(self, w, params):
        return {"weight": w["weight"]}

    def prepare(self, ctx, params):
        self.weight, self.eps = ctx.weights["weight"], ctx.config.rms_norm_eps

    def forward(self, x, residual=None):
        if residual is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        summed = x + residual
        return F.rms_norm(summed, self.weight.shape, self.weight, self.eps), summed
