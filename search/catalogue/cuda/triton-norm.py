"""RMSNorm as one Triton kernel."""

import torch
import triton
import triton.language as tl

from hotpass import part


@part(
    engine="decoder",
    claims=["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"],
    replaces="LlamaRMSNorm",
    numerics="tolerance",
    reload="reweight",
    device="cuda",
)
class TritonNorm:
    """The loaded norm is six kernels, each of which reads and writes the whole input; this reads it once and writes the result once, with the
    sum of squares in float32 registers. At decode that is five launches less for each of two norms a layer. It will not help where
    CUDA graphs or a compiled model have removed the launches already, nor under a part that covers the layer; the sum with the residual
    stays outside, since it is no slot of its own (`triton-decode` fuses it).
    """

    def weights(self, w, params):
        return {"weight": w["weight"]}

    def prepare(self, ctx, params):
        self.weight, self.eps = ctx.weights["weight"], ctx.config.rms_norm_eps

    def forward(self, hidden_states):
        x = hidden_states.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        _norm_kernel[(x.numel() // width,)](
            x, x, self.weight, out, x.numel() // width, width, self.eps, SPLITS=0, BLOCK=triton.next_power_of_2(width)
        )
        return out


@triton.jit
def _norm_kernel(x, parts, weight, out, num_rows, width, eps, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """x[row] += sum of parts[split, row], kept in x; out[row] = RMSNorm of it; grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)  # a long prompt's rows have more than 2^31 values
    i = tl.arange(0, BLOCK)
    inside = i < width
    value = tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        value += tl.load(parts + (split * num_rows + row) * width + i, mask=inside, other=0.0)
    if SPLITS > 0:
        tl.store(x + row * width + i, value, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    weighted = value * scale * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, weighted.to(out.dtype.element_ty), mask=inside)
