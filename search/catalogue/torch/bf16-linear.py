"""Linear layers with bfloat16 storage."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hotpass import part


@part(
    engine="decoder",
    claims=[
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.k_proj",
        "model.layers.*.self_attn.v_proj",
        "model.layers.*.self_attn.o_proj",
        "model.layers.*.mlp.gate_proj",
        "model.layers.*.mlp.up_proj",
        "model.layers.*.mlp.down_proj",
        "lm_head",
    ],
    replaces="Linear",
    numerics="lossy",
    reload="reweight",
    numerics_when={"dtype=bfloat16": "tolerance"},
)
class Bf16Linear:
    """Half the bytes of float32 weights, and at prefill the matrix units of processors and GPUs that have them for bfloat16. Weights and
    inputs are rounded to 8 bits of mantissa, with float32 accumulation inside the product, so on a float32 model it is lossy; on a
    bfloat16 model it computes what the loaded model computes, and so gains nothing there. It will not help at batch 1 on CPUs where the
    library unpacks the matrix at each call, or on CPUs without bfloat16 instructions, where it is emulated.
    """

    def weights(self, w, params):
        return {"weight": w["weight"].to(torch.bfloat16)}

    def prepare(self, ctx, params):
        self.weight = ctx.weights["weight"]

    def forward(self, x):
        return F.linear(x.to(torch.bfloat16), self.weight).to(x.dtype)
