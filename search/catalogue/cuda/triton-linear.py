"""Linear layers at decode as split-K matrix-vector products in Triton."""

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
    domain="phase == 'decode' and num_seqs <= 8",
    params={"splits": [4, 1, 8]},
    numerics="tolerance",
    reload="reweight",
    device="cuda",
)
class TritonLinear:
    """A library's product for one to eight rows may use tiles of 64 rows, most of them empty, and too few blocks to keep every multiprocessor
    loading. Here each program streams 16 rows of the matrix, and the inner dimension is split so that even a 576-wide projection makes
    hundreds of programs; partial sums are added in a fixed order, so results repeat. It will not help at prefill or larger batches, where
    tensor cores win (hence the domain), or for matrices of tens of thousands of rows, which the library's own kernel streams well. Biases
    are not known to it.
    """

    def weights(self, w, params):
        return {"weight": w["weight"]}

    def prepare(self, ctx, params):
        self.weight, self.splits = ctx.weights["weight"].contiguous(), params["splits"]
        if ctx.device.type == "cuda":
            for rows in MAX_ROWS:
                self.forward(torch.zeros(rows, self.weight.shape[1], dtype=self.weight.dtype, device=ctx.device))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        return _gemv(flat, self.weight, self.splits).sum(dim=0).to(x.dtype).view(*x.shape[:-1], -1)


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
