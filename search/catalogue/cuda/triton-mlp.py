"""The gated MLP at decode: gate, up and SiLU in one Triton kernel, the down projection in another."""

import torch
import triton
import triton.language as tl

from hotpass import part

BLOCK_OUT = 16
"""Rows of a matrix in one program: with split sums, a few hundred programs even for a small model's matrices."""

MAX_ROWS = (1, 2, 4, 8)
"""Row counts that kernels are made for, the domain's limit last; made in `prepare`, so that none is compiled while serving."""


@part(
    engine="decoder",
    claims=["model.layers.*.mlp"],
    replaces="LlamaMLP",
    domain="phase == 'decode' and num_seqs <= 8",
    params={"splits": [4, 1, 8]},
    numerics="tolerance",
    reload="reweight",
    device="cuda",
)
class TritonMlp:
    """Three products and two pointwise kernels become two kernels: each program streams the same rows of the gate and the up matrix, and applies
    SiLU and the product in registers, in float32; the down projection, whose output is narrow, splits its inner dimension so that enough
    programs load at once. It will not help at prefill or larger batches, where tensor cores win (hence the domain), and gains least for
    models so wide that each product takes much longer than its launch.
    """

    def weights(self, w, params):
        return {"gate_up": torch.cat([w["gate_proj.weight"], w["up_proj.weight"]]), "down": w["down_proj.weight"]}

    def prepare(self, ctx, params):
        if ctx.config.mlp_bias or ctx.config.hidden_act not in ("silu", "swish"):
            raise ValueError("triton-mlp knows an MLP without biases and with SiLU only")
        self.gate_up, self.down, self.splits = (
            ctx.weights["gate_up"],
            ctx.weights["down"].contiguous(),
            params["splits"],
        )
        if ctx.device.type == "cuda":
            for rows in MAX_ROWS:
                self.forward(torch.zeros(rows, self.gate_up.shape[1], dtype=self.gate_up.dtype, device=ctx.device))

    def forward(self, x):
        inner = _gated(x.reshape(-1, x.shape[-1]), self.gate_up)
        return _gemv(inner, self.down, self.splits).sum(dim=0).to(x.dtype).view(x.shape)


def _block_in(rows):
    """Columns of one step: whole bursts, and products that stay in registers (above 64 with eight rows they spill on sm_90)."""
    return min(256, 512 // triton.next_power_of_2(rows))


def _gemv(x, w, splits):
    """x [rows <= 8, in], w [out, in] → float32 [splits, rows, out], to be summed over the splits."""
    rows, (num_out, num_in) = x.shape[0], w.shape
    out = torch.empty(splits, rows, num_out, dtype=torch.float32, device=x.device)
    _gemv_kernel[(triton.cdiv(num_out, BLOCK_OUT), splits)](
        x, w, out, rows, num_out, num_in, x.stride(0),
        ROWS=triton.next_power_of_2(rows), BLOCK_OUT=BLOCK_OUT, BLOCK_IN=_block_in(rows), SPLITS=splits,
    )  # fmt: skip
    return out


def _gated(x, gate_up):
    """x [rows <= 8, in], gate_up [2 * inner, in] → float32 [rows, inner]."""
    rows, inner = x.shape[0], gate_up.shape[0] // 2
    out = torch.empty(rows, inner, dtype=torch.float32, device=x.device)
    _gated_kernel[(triton.cdiv(inner, BLOCK_OUT),)](
        x, gate_up, out, rows, inner, x.shape[1], x.stride(0),
        ROWS=triton.next_power_of_2(rows), BLOCK_OUT=BLOCK_OUT, BLOCK_IN=_block_in(rows),
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(
    x,
    w,
    out,
    num_rows,
    num_inner,
    num_in,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """out[row, o] = silu(gate) * up, where w holds the gate's rows, then the up projection's; grid (blocks of o,)."""
    o = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, ROWS)
    gate = tl.zeros((ROWS, BLOCK_OUT), dtype=tl.float32)
    up = tl.zeros((ROWS, BLOCK_OUT), dtype=tl.float32)
    for start in range(0, num_in, BLOCK_IN):
        i = start + tl.arange(0, BLOCK_IN)
        x_mask = (row[:, None] < num_rows) & (i[None, :] < num_in)
        x_block = tl.load(x + row[:, None] * x_stride + i[None, :], mask=x_mask, other=0.0).to(tl.float32)
        w_mask = (o[:, None] < num_inner) & (i[None, :] < num_in)
        gate_at = o[:, None].to(tl.int64) * num_in + i[None, :]
        up_at = (num_inner + o[:, None]).to(tl.int64) * num_in + i[None, :]
        gate_block = tl.load(w + gate_at, mask=w_mask, other=0.0).to(tl.float32)
        up_block = tl.load(w + up_at, mask=w_mask, other=0.0).to(tl.float32)
        gate += tl.sum(x_block[:, None, :] * gate_block[None, :, :], axis=2)
        up += tl.sum(x_block[:, None, :] * up_block[None, :, :], axis=2)
    mask = (row[:, None] < num_rows) & (o[None, :] < num_inner)
    tl.store(out + row[:, None] * num_inner + o[None, :], gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


@triton.jit
def _gemv_kernel(
    x,
    w,
    out,
    num_rows,
    num_out,
    num_in,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """out[split, row, o] = sum over the split's share of i of x[row, i] * w[o, i]; grid (blocks of o, splits)."""
    o = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK_OUT), dtype=tl.float32)
    share = tl.cdiv(tl.cdiv(num_in, SPLITS), BLOCK_IN) * BLOCK_IN
    end = tl.minimum(split * share + share, num_in)
    for start in range(split * share, end, BLOCK_IN):
        i = start + tl.arange(0, BLOCK_IN)
        w_mask = (o[:, None] < num_out) & (i[None, :] < end)
        w_block = tl.load(w + o[:, None].to(tl.int64) * num_in + i[None, :], mask=w_mask, other=0.0).to(tl.float32)
        x_mask = (row[:, None] < num_rows) & (i[None, :] < end)
        x_block = tl.load(x + row[:, None] * x_stride + i[None, :], mask=x_mask, other=0.0).to(tl.float32)
        total += tl.sum(x_block[:, None, :] * w_block[None, :, :], axis=2)
    mask = (row[:, None] < num_rows) & (o[None, :] < num_out)
    tl.store(out + (split * num_rows + row[:, None]) * num_out + o[None, :], total, mask=mask)
