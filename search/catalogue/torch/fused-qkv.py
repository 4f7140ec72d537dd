"""Self-attention with the query, key and value projections as one matrix, and grouped attention over the KV slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hotpass import part


@part(
    engine="decoder",
    claims=["model.layers.*.self_attn"],
    keeps=["o_proj"],
    replaces="LlamaAttention",
    params={"attention": ["sdpa", "bmm"]},
    numerics="tolerance",
    reload="reweight",
)
class FusedQkv:
    """One product instead of three: with grouped heads the key and value matrices are small, so alone each pays more for the launch, or
    the thread barrier, than for its bytes. Query heads that share a key head are then treated as rows of one small product, so keys and
    values are never repeated, where the loaded attention may copy them once for each query head. It will not help at long prefill,
    where attention and large products dominate, nor beat a whole-layer part, which saves the same and more. The output projection
    stays a slot of its own. Lengths are read on the host, so it cannot be captured in a CUDA graph.
    """

    def weights(self, w, params):
        return {"qkv": torch.cat([w["q_proj.weight"], w["k_proj.weight"], w["v_proj.weight"]])}

    def prepare(self, ctx, params):
        config = ctx.config
        if config.attention_bias:
            raise ValueError("fused-qkv knows attention without biases only")
        if ctx.settings.get("cuda_graphs"):
            raise ValueError("fused-qkv reads lengths on the host and cannot be captured; set cuda_graphs to False")
        self.kv_heads = config.num_key_value_heads
        self.groups = config.num_attention_heads // self.kv_heads
        self.head_dim = config.head_dim
        self.scale = self.head_dim**-0.5
        self.qkv, self.output = ctx.weights["qkv"], ctx.kept("o_proj")
        self.step, self.layer = ctx.step, ctx.layer
        self.attend_one = _sdpa if params["attention"] == "sdpa" else _bmm

    def forward(self, hidden_states, position_embeddings=None, **_):
        batch, kv = self.step.batch, self.step.kv
        heads = self.groups * self.kv_heads
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        qkv = F.linear(x, self.qkv).view(x.shape[0], heads + 2 * self.kv_heads, self.head_dim)
        cos, sin = (table.reshape(-1, 1, self.head_dim) for table in position_embeddings)
        qk = _rotate(qkv[:, : heads + self.kv_heads], cos, sin)
        keys, values = kv.keys(self.layer), kv.values(self.layer)
        _write(keys, values, qk[:, heads:], qkv[:, heads + self.kv_heads :], batch)
        mixed = self._attend(qk[:, :heads], keys, values, batch)
        return self.output(mixed.view(*hidden_states.shape[:-1], -1)), None

    def _attend(self, q, keys, values, batch):
        """q [T, heads, head_dim] → [T, heads * head_dim], sequence after sequence."""
        out = torch.empty(q.shape[0], self.kv_heads, self.groups, self.head_dim, dtype=q.dtype, device=q.device)
        grouped = q.reshape(q.shape[0], self.kv_heads, self.groups, self.head_dim)
        for start, stop, slot, context in _sequences(batch):
            k, v = (_typed(cache[slot, :, : context + stop - start], q) for cache in (keys, values))
            if stop - start == 1:
                out[start] = self.attend_one(grouped[start], k, v, self.scale)
            else:
                out[start:stop] = _causal(grouped[start:stop], k, v, context, self.scale)
        return out.view(q.shape[0], -1)


def _sequences(batch):
    starts = batch.host_seq_starts
    return zip(starts[:-1], starts[1:], batch.host_slots, batch.host_contexts, strict=True)


def _typed(cache, like):
    return cache if cache.dtype == like.dtype else cache.to(like.dtype)


def _rotate(x, cos, sin):
    """Rotary embedding; x [T, heads, head_dim], the second half rotated against the first."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _write(keys, values, k, v, batch):
    """Store k and v [T, kv_heads, head_dim] at (slot, position)."""
    if batch.phase == "decode":
        slots = batch.slots
    else:
        slots = torch.repeat_interleave(batch.slots, batch.seq_starts.diff(), output_size=batch.query_tokens)
    keys[slots, :, batch.positions] = k.to(keys.dtype)
    values[slots, :, batch.positions] = v.to(values.dtype)


def _sdpa(q, k, v, scale):
    """One token: q [kv_heads, groups, head_dim], k and v [kv_heads, length, head_dim]."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)[0]


def _bmm(q, k, v, scale):
    scores = torch.bmm(q * scale, k.transpose(1, 2))
    return torch.bmm(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


def _causal(q, k, v, context, scale):
    """Several tokens: q [t, kv_heads, groups, head_dim]; token i sees the context and the tokens up to itself."""
    tokens, length = q.shape[0], k.shape[1]
    shape = (k.shape[0], q.shape[2], length, k.shape[2])
    k, v = (cache[:, None].expand(shape) for cache in (k, v))
    mask = None if context == 0 else torch.ones(tokens, length, dtype=torch.bool, device=q.device).tril(context)
    mixed = F.scaled_dot_product_attention(
        q.permute(1, 2, 0, 3), k, v, attn_mask=mask, is_causal=context == 0, scale=scale
    )
    return mixed.permute(2, 0, 1, 3)
