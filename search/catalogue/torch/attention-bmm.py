"""Decode attention by two batched products."""

from __future__ import annotations

import torch

from hotpass import part


@part(
    engine="decoder",
    claims=["model.layers.*.self_attn"],
    keeps=["q_proj", "k_proj", "v_proj", "o_proj"],
    replaces="LlamaAttention",
    domain="phase == 'decode'",
    numerics="tolerance",
)
class AttentionBmm:
    """At decode each sequence's attention is two small batched products and a softmax, without the fused attention's blocking and set-up,
    which on a CPU costs more than the arithmetic of one query row. Grouped heads are rows of one product, so keys and values are not
    repeated. It will not help at long contexts, where the scores no longer stay in cache and `attention-split` uses all threads, nor
    on a GPU, where every product is a launch. Lengths are read on the host, so it cannot be captured in a CUDA graph.
    """

    def prepare(self, ctx, params):
        if ctx.settings.get("cuda_graphs"):
            raise ValueError("attention-bmm reads lengths on the host and cannot be captured; set cuda_graphs to False")
        config = ctx.config
        self.shape = (
            config.num_key_value_heads,
            config.num_attention_heads // config.num_key_value_heads,
            config.head_dim,
        )
        self.scale = config.head_dim**-0.5
        self.query, self.key, self.value, self.output = (ctx.kept(f"{name}_proj") for name in "qkvo")
        self.step, self.layer = ctx.step, ctx.layer

    def forward(self, hidden_states, position_embeddings=None, **_):
        batch, kv = self.step.batch, self.step.kv
        kv_heads, groups, head_dim = self.shape
        cos, sin = (table.reshape(-1, 1, head_dim) for table in position_embeddings)
        q = _rotate(self.query(hidden_states).view(-1, kv_heads * groups, head_dim), cos, sin)
        k = _rotate(self.key(hidden_states).view(-1, kv_heads, head_dim), cos, sin)
        v = self.value(hidden_states).view(-1, kv_heads, head_dim)
        keys, values = kv.keys(self.layer), kv.values(self.layer)
        keys[batch.slots, :, batch.positions] = k.to(keys.dtype)
        values[batch.slots, :, batch.positions] = v.to(values.dtype)
        mixed = self._attend(q.view(-1, *self.shape), keys, values, batch)
        return self.output(mixed.view(*hidden_states.shape[:-1], -1)), None

    def _attend(self, q, keys, values, batch):
        """q [num_seqs, kv_heads, groups, head_dim] → the same shape."""
        out = torch.empty_like(q)
        for i, (slot, context) in enumerate(zip(batch.host_slots, batch.host_contexts, strict=True)):
            k, v = (_typed(cache[slot, :, : context + 1], q) for cache in (keys, values))
            scores = torch.bmm(q[i] * self.scale, k.transpose(1, 2))
            torch.bmm(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v, out=out[i])
        return out


def _typed(cache, like):
    return cache if cache.dtype == like.dtype else cache.to(like.dtype)


def _rotate(x, cos, sin):
    """Rotary embedding; x [num_seqs, heads, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
