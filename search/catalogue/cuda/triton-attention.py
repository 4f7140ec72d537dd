"""Decode attention in Triton: rotary embedding with the KV write, and flash decoding over the KV slots."""

import torch
import triton
import triton.language as tl

from hotpass import part


@part(
    engine="decoder",
    claims=["model.layers.*.self_attn"],
    keeps=["q_proj", "k_proj", "v_proj", "o_proj"],
    replaces="LlamaAttention",
    domain="phase == 'decode'",
    params={"context_splits": [8, 4, 16]},
    numerics="tolerance",
    device="cuda",
)
class TritonAttention:
    """The loaded attention gathers and masks a copy of every sequence's keys and values before each fused call; this reads them in place, each
    once for all query heads that share it. The context is split over programs and combined by log-sum-exp, so that one long sequence keeps
    the whole GPU loading, and rotary embedding and the KV write are one kernel before it. Lengths are read on the device, so a captured
    graph replays at any context. It will not help at short contexts, where three launches are all there is to save, or at prefill, where
    attention is bound by tensor cores (hence the domain).
    """

    def prepare(self, ctx, params):
        config = ctx.config
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.query, self.key, self.value, self.output = (ctx.kept(f"{name}_proj") for name in "qkvo")
        self.step, self.layer, self.splits = ctx.step, ctx.layer, params["context_splits"]

    def forward(self, hidden_states, position_embeddings=None, **_):
        batch, kv = self.step.batch, self.step.kv
        q, k, v = (project(hidden_states).view(batch.num_seqs, -1) for project in (self.query, self.key, self.value))
        tables = [table.reshape(batch.num_seqs, -1) for table in position_embeddings]
        keys, values = kv.keys(self.layer), kv.values(self.layer)
        mixed = _attention(q, k, v, tables, False, batch, keys, values, self.shape, self.splits)
        return self.output(mixed.to(hidden_states.dtype).view(*hidden_states.shape[:-1], -1)), None


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
