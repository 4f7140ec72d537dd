"""RMSNorm as one call."""

from __future__ import annotations

import torch.nn.functional as F

from hotpass import part


@part(
    engine="decoder",
    claims=["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"],
    replaces="LlamaRMSNorm",
    numerics="tolerance",
    reload="reweight",
)
class NormFused:
    """The loaded norm is six calls from Python, two of them dtype conversions; this is one, and on a GPU one kernel that reads the input
    once. At decode, where a norm moves a few kilobytes, calls are all it costs. It will not help at prefill, where the products dominate,
    on a compiled model, which fuses the norm already, or under a part that covers the layer.
    """

    def weights(self, w, params):
        return {"weight": w["weight"]}

    def prepare(self, ctx, params):
        self.weight = ctx.weights["weight"]
        self.eps = ctx.config.rms_norm_eps

    def forward(self, hidden_states):
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)
