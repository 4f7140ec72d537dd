"""Decode attention by the fused kernel, grouped heads as rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hotpass import part


@part(
    engine="decoder",
    claims=["model.layers.*.self_attn"],
    keeps=["q_proj", "k_proj", "v_proj", "o_proj"],
    replaces="LlamaAttention",
    domain="phase == 'decode'",
    numerics="tolerance",
)
class AttentionSdpaGrouped:
    """At decode the query heads that share a key head are passed to the fused attention as rows of one head, so keys and values are read once
    and in place, where repeating them for each query head copies the context several times over. When all sequences have equal length
    and neighbouring slots, one call serves the batch; else one call a sequence. It will not help without grouped heads, at short
    contexts, where the projections dominate, or with many unequal sequences, where the calls add up. Lengths are read on the host, so
    it cannot be captured in a CUDA graph.
    """

    def prepare(self, ctx, params):
        if ctx.settings.get("cuda_graphs"):
            raise ValueError(
                "attention-sdpa-grouped reads lengths on the host and cannot be captured; set cuda_graphs to False"
            )
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
        first = batch.host_slots[0]
        together = len(set(batch.host_contexts)) == 1 and list(batch.host_slots) == list(range(first, first + len(q)))
        if together:
            length = batch.host_contexts[0] + 1
            k, v = (_typed(cache[first : first + len(q), :, :length], q) for cache in (keys, values))
            return F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        out = torch.empty_like(q)
        for i, (slot, context) in enumerate(zip(batch.host_slots, batch.host_contexts, strict=True)):
            k, v = (_typed(cache[slot, :, : context + 1], q) for cache in (keys, values))
            out[i] = F.scaled_dot_product_attention(q[i : i + 1], k[None], v[None], scale=self.scale)[0]
        return out


def _typed(cache, like):
    return cache if cache.dtype == like.dtype else cache.to(like.dtype)


def _rotate(x, cos, sin):
    """Rotary embedding; x [num_seqs, heads, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
