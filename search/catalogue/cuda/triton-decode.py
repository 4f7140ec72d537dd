"""The whole decode step in nine Triton kernels a layer, float32 between them."""

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hotpass import part

BLOCK_OUT = 16
"""Rows of a matrix in one program: with split sums, a few hundred programs even for a small model's matrices."""

MAX_ROWS = (1, 2, 4, 8)
"""Row counts that kernels are made for, the domain's limit last; made in `prepare`, so that none is compiled while serving."""


@part(
    engine="decoder",
    claims=["model"],
    domain="phase == 'decode' and num_seqs <= 8",
    params={"splits": [4, 1, 8], "context_splits": [8, 4, 16]},
    numerics="tolerance",
    reload="reweight",
    device="cuda",
    requires=["family:llama"],
)
class TritonDecode:
    """A decode step streams every weight once and does little else, so what matters is that all multiprocessors load all the time and that
    nothing waits between: residual sum and norm are one kernel, query, key and value one product, rotary embedding and KV write one
    kernel, attention is split over the context, and the gated MLP is one kernel before its down projection. Everything between kernels is
    float32, so that on a bfloat16 model it is nearer to the reference than the loaded forward. Lengths are read on the device: with the
    setting `cuda_graphs` the launches, some nine a layer, cost almost nothing; without it they bound a small model. It will not help at
    prefill or above eight sequences, where tensor cores win (hence the domain).
    """

    def weights(self, w, params):
        made = {"embed": w["model.embed_tokens.weight"], "head": w["lm_head.weight"], "norm": w["model.norm.weight"]}
        for index in range(sum(name.endswith(".input_layernorm.weight") for name in w)):
            at = f"model.layers.{index}."
            made |= {
                f"{index}.attention_norm": w[at + "input_layernorm.weight"],
                f"{index}.qkv": torch.cat([w[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]),
                f"{index}.o": w[at + "self_attn.o_proj.weight"],
                f"{index}.mlp_norm": w[at + "post_attention_layernorm.weight"],
                f"{index}.gate_up": torch.cat([w[at + "mlp.gate_proj.weight"], w[at + "mlp.up_proj.weight"]]),
                f"{index}.down": w[at + "mlp.down_proj.weight"],
            }
        return made

    def prepare(self, ctx, params):
        config, w = ctx.config, ctx.weights
        if config.attention_bias or config.mlp_bias or config.hidden_act not in ("silu", "swish"):
            raise ValueError("triton-decode knows Llama without biases and with SiLU only")
        if config.rope_parameters["rope_type"] not in ("default", "linear", "llama3", "yarn"):
            raise ValueError(f"triton-decode does not know rotary type {config.rope_parameters['rope_type']}")
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.eps, self.splits, self.context_splits = config.rms_norm_eps, params["splits"], params["context_splits"]
        self.embed, self.head, self.norm = w["embed"], w["head"].contiguous(), w["norm"]
        names = ("attention_norm", "qkv", "o", "mlp_norm", "gate_up", "down")
        self.layers = [
            SimpleNamespace(**{name: w[f"{index}.{name}"].contiguous() for name in names})
            for index in range(config.num_hidden_layers)
        ]
        rotary = LlamaRotaryEmbedding(config)
        angles = torch.outer(torch.arange(ctx.kv.max_context, dtype=torch.float32), rotary.inv_freq.float().cpu())
        tables = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        self.tables = [table.to(ctx.device) for table in tables]
        if ctx.device.type == "cuda":
            for rows in MAX_ROWS:
                self._products(rows, ctx.device)

    def _products(self, rows, device):
        """Every kernel whose code depends on the number of rows, once, on zeros."""
        layer = self.layers[0]
        for weight, splits in ((layer.qkv, 1), (layer.o, self.splits), (layer.down, self.splits), (self.head, 1)):
            _gemv(torch.zeros(rows, weight.shape[1], device=device), weight, splits)
        _gated(torch.zeros(rows, layer.gate_up.shape[1], device=device), layer.gate_up)

    @torch.inference_mode()
    def forward(self, batch, kv):
        """Logits float32 [num_seqs, vocab]."""
        heads, kv_heads, dim = self.shape
        x = self.embed[batch.tokens].float()
        added = None
        for index, layer in enumerate(self.layers):
            qkv = _gemv(_add_norm(x, added, layer.attention_norm, self.eps), layer.qkv, 1)[0]
            q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
            keys, values = kv.keys(index), kv.values(index)
            mixed = _attention(q, k, v, self.tables, True, batch, keys, values, self.shape, self.context_splits)
            added = _gemv(mixed, layer.o, self.splits)
            inner = _gated(_add_norm(x, added, layer.mlp_norm, self.eps), layer.gate_up)
            added = _gemv(inner, layer.down, self.splits)
        return _gemv(_add_norm(x, added, self.norm, self.eps), self.head, 1)[0]


def _add_norm(x, parts, weight, eps):
    """x [rows, width] += parts [splits, rows, width] summed, in place; returns its RMSNorm, float32."""
    out = torch.empty_like(x)
    splits = 0 if parts is None else parts.shape[0]
    _norm_kernel[(x.shape[0],)](
        x, x if parts is None else parts, weight, out, x.shape[0], x.shape[1], eps,
        SPLITS=splits, BLOCK=triton.next_power_of_2(x.shape[1]),
    )  # fmt: skip
    return out


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


def _attention(q, k, v, tables, by_position, batch, keys, values, shape, splits):
    """Stores k and v, then attends. q [n, heads * dim], k and v [n, kv_heads * dim], rows perhaps apart → float32 [n, heads * dim]."""
    heads, kv_heads, dim = shape
    n, device = q.shape[0], q.device
    rotated = torch.empty(n, heads, dim, dtype=torch.float32, device=device)
    _rotary_kernel[(n, heads + 2 * kv_heads)](
        q, k, v, *tables, batch.slots, batch.positions, rotated, keys, values,
        q.stride(0), k.stride(0), v.stride(0), tables[0].stride(0), *keys.stride()[:3], heads, kv_heads,
        BY_POSITION=by_position, HALF=dim // 2, HALF_PADDED=triton.next_power_of_2(dim // 2),
    )  # fmt: skip
    groups = heads // kv_heads
    mixed = torch.empty(n, heads, splits, dim, dtype=torch.float32, device=device)
    tops, sums = torch.empty(2, n, heads, splits, dtype=torch.float32, device=device)
    padded, groups_padded = triton.next_power_of_2(dim), triton.next_power_of_2(groups)
    block = min(64, max(8, 8192 // (groups_padded * padded)))  # positions a step whose products stay in registers
    _attend_kernel[(n, kv_heads, splits)](
        rotated, keys, values, batch.slots, batch.positions, mixed, tops, sums, dim**-0.5, *keys.stride()[:3], kv_heads,
        GROUPS=groups, GROUPS_PADDED=groups_padded, DIM=dim, DIM_PADDED=padded, BLOCK=block, SPLITS=splits,
    )  # fmt: skip
    out = torch.empty(n, heads * dim, dtype=torch.float32, device=device)
    _combine_kernel[(n * heads,)](mixed, tops, sums, out, DIM=dim, DIM_PADDED=padded, SPLITS=splits)
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
def _rotary_kernel(
    q,
    k,
    v,
    cos,
    sin,
    slots,
    positions,
    q_out,
    keys,
    values,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    slot_stride,
    head_stride,
    position_stride,
    heads,
    kv_heads,
    BY_POSITION: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """Rotates one head of one sequence's query, or rotates and stores its key, or stores its value; grid (num_seqs, heads + 2 * kv_heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, HALF_PADDED)
    inside = d < HALF
    position = tl.load(positions + row)
    place = tl.load(slots + row) * slot_stride + position * position_stride
    if head < heads + kv_heads:
        table = row.to(tl.int64) * table_stride
        if BY_POSITION:
            table = position * table_stride
        c = tl.load(cos + table + d, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + table + d, mask=inside, other=0.0).to(tl.float32)
        if head < heads:
            at = row * q_stride + head * 2 * HALF + d
            low = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(q + at + HALF, mask=inside, other=0.0).to(tl.float32)
            q_to = q_out + (row * heads + head) * 2 * HALF + d
            tl.store(q_to, low * c - high * s, mask=inside)
            tl.store(q_to + HALF, high * c + low * s, mask=inside)
        else:
            at = row * k_stride + (head - heads) * 2 * HALF + d
            low = tl.load(k + at, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(k + at + HALF, mask=inside, other=0.0).to(tl.float32)
            k_to = keys + place + (head - heads) * head_stride + d
            tl.store(k_to, (low * c - high * s).to(keys.dtype.element_ty), mask=inside)
            tl.store(k_to + HALF, (high * c + low * s).to(keys.dtype.element_ty), mask=inside)
    else:
        at = row * v_stride + (head - heads - kv_heads) * 2 * HALF + d
        v_to = values + place + (head - heads - kv_heads) * head_stride + d
        tl.store(v_to, tl.load(v + at, mask=inside, other=0.0).to(values.dtype.element_ty), mask=inside)
        tl.store(v_to + HALF, tl.load(v + at + HALF, mask=inside, other=0.0).to(values.dtype.element_ty), mask=inside)


@triton.jit
def _attend_kernel(
    q,
    keys,
    values,
    slots,
    positions,
    mixed,
    tops,
    sums,
    scale,
    slot_stride,
    head_stride,
    position_stride,
    kv_heads,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One share of one sequence's context, for the query heads of one key head, by running softmax; grid (num_seqs, kv_heads, SPLITS).

    The length is read on the device, so that a captured graph replays with any context. An empty share has top = -inf and sum = 0.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = (tl.load(positions + row) + 1).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    end = tl.minimum(split * share + share, length)
    g = tl.arange(0, GROUPS_PADDED)
    d = tl.arange(0, DIM_PADDED)
    first = (row * kv_heads + head) * GROUPS
    q_mask = (g[:, None] < GROUPS) & (d[None, :] < DIM)
    q_block = tl.load(q + (first + g[:, None]) * DIM + d[None, :], mask=q_mask, other=0.0).to(tl.float32) * scale
    place = tl.load(slots + row) * slot_stride + head * head_stride
    top = tl.full((GROUPS_PADDED,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((GROUPS_PADDED,), dtype=tl.float32)
    mix = tl.zeros((GROUPS_PADDED, DIM_PADDED), dtype=tl.float32)
    for start in range(split * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        at = place + n[:, None] * position_stride + d[None, :]
        mask = (n[:, None] < end) & (d[None, :] < DIM)
        k_block = tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)
        scores = tl.sum(q_block[:, None, :] * k_block[None, :, :], axis=2)
        scores = tl.where(n[None, :] < end, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        v_block = tl.load(values + at, mask=mask, other=0.0).to(tl.float32)
        total = total * shrink + tl.sum(weights, axis=1)
        mix = mix * shrink[:, None] + tl.sum(weights[:, :, None] * v_block[None, :, :], axis=1)
        top = new_top
    to = (first + g) * SPLITS + split
    tl.store(tops + to, top, mask=g < GROUPS)
    tl.store(sums + to, total, mask=g < GROUPS)
    tl.store(mixed + to[:, None] * DIM + d[None, :], mix, mask=q_mask)


@triton.jit
def _combine_kernel(mixed, tops, sums, out, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """Shares of the context combined by their log-sum-exp weights; grid (num_seqs * heads,)."""
    head = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM_PADDED)
    top = tl.load(tops + head * SPLITS + s)
    share = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(share * tl.load(sums + head * SPLITS + s), axis=0)
    at = (head * SPLITS + s[:, None]) * DIM + d[None, :]
    mix = tl.load(mixed + at, mask=d[None, :] < DIM, other=0.0)
    tl.store(out + head * DIM + d, tl.sum(mix * share[:, None], axis=0) / total, mask=d < DIM)
