"""vLLM's gated MLP as two or three products of the CPU library, without the modules between them."""

from __future__ import annotations

import torch

from hotpass import part


@part(
    engine="vllm",
    claims=["model.layers.*.mlp"],
    replaces="LlamaMLP",
    params={"products": ["fused", "joined"]},
    numerics="tolerance",
    reload="reweight",
    device="cpu",
    requires=["isa:avx2"],
)
class VllmMlp:
    """vLLM goes through three modules and four passes over the activations: both projections, SiLU, product, down projection. `fused`
    lets the library apply the SiLU to what the gate's product writes and the multiplication to what the other one writes, so that
    nothing is read a second time; `joined` keeps gate and up projection as one matrix, as vLLM does, and only leaves out the modules.
    Matrices are laid out once, and are a copy of the MLP's weights. The bytes streamed are the same, so it will not help where a step
    is bound by memory bandwidth alone.
    """

    def weights(self, w, params):
        both, down = w["gate_up_proj.weight"], w["down_proj.weight"]
        if params["products"] == "joined":
            return {"both": both, "down": down}
        gate, up = both.chunk(2)
        return {"gate": gate, "up": up, "down": down}

    def prepare(self, ctx, params):
        if getattr(ctx.config, "mlp_bias", False):
            raise ValueError("vllm-mlp knows an MLP without biases only")
        dtypes = {weight.dtype for weight in ctx.weights.values()}
        if not dtypes <= {torch.float32, torch.bfloat16}:
            raise ValueError(f"vllm-mlp knows float32 and bfloat16, not {dtypes}")
        if torch.bfloat16 in dtypes and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            raise ValueError("vllm-mlp needs a processor whose library multiplies bfloat16")
        self.packed = {
            name: torch.ops.mkldnn._reorder_linear_weight(weight, None) for name, weight in ctx.weights.items()
        }
        self.gated = self.joined if params["products"] == "joined" else self.fused

    def forward(self, x):
        return _product(self.gated(x), self.packed["down"])

    def fused(self, x):
        gate = _product(x, self.packed["gate"], "swish")
        return torch.ops.mkldnn._linear_pointwise.binary(x, gate, self.packed["up"], None, "mul")

    def joined(self, x):
        gate, up = _product(x, self.packed["both"]).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    def close(self):
        self.packed = self.gated = None


def _product(x, packed, then="none"):
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, then, [], "")
