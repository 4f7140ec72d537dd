"""vLLM's gate: SiLU and product without a second buffer."""

from __future__ import annotations

import torch.nn.functional as F

from hotpass import part


@part(
    engine="vllm",
    claims=["model.layers.*.mlp.act_fn"],
    replaces="SiluAndMul",
    numerics="bit-identical",
)
class VllmSiluMul:
    """vLLM's own activation on a CPU makes one buffer for the SiLU and another for the product; here the product is taken in the first
    one. The arithmetic is the same in the same order, so every bit is. It saves an allocation and its page faults for a prompt of
    hundreds of tokens, and next to nothing at decode with a few sequences.
    """

    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
