"""Gated MLP with gate and up projection as one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hotpass import part


@part(engine="decoder", claims=["model.layers.*.mlp"], replaces="LlamaMLP", numerics="tolerance", reload="reweight")
class FusedGateUp:
    """Gate and up projection read the same input, so one matrix with both saves a launch (and a thread barrier on a CPU) per layer,
    and at decode a longer matrix keeps all threads or multiprocessors busy until the end. It streams as many bytes as before, so it
    will not help where a step is bound by memory bandwidth alone, and hardly at prefill, where each matrix is large enough by itself.
    The derived matrix is a second copy of two thirds of the MLP's weights.
    """

    def weights(self, w, params):
        return {"gate_up": torch.cat([w["gate_proj.weight"], w["up_proj.weight"]]), "down": w["down_proj.weight"]}

    def prepare(self, ctx, params):
        if ctx.config.mlp_bias or ctx.config.hidden_act not in ("silu", "swish"):
            raise ValueError("fused-gate-up knows an MLP without biases and with SiLU only")
        self.gate_up, self.down = ctx.weights["gate_up"], ctx.weights["down"]

    def forward(self, x):
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), self.down)
