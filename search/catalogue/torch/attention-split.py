"""Decode attention over pieces of the context, combined by log-sum-exp."""

from __future__ import annotations

import torch

from hotpass import part


@part(
    engine="decoder",
    claims=["model.layers.*.self_attn"],
    keeps=["q_proj", "k_proj", "v_proj", "o_proj"],
    replaces="LlamaAttention",
    domain="phase == 'decode' and context >= 64",
    params={"pieces": [2, 4, 8]},
    numerics="tolerance",
)
class AttentionSplit:
    """At decode the context is cut into equal pieces which attend separately and are combined by their log-sum-exp weights, so that one long
    sequence with few key heads still gives work to every thread or multiprocessor (three key heads on two threads finish as late as
    four). It will not help at short contexts, where the combination costs more than it saves, hence its domain, or when sequences times
    key heads already fill the machine. Lengths are read on the host, so it cannot be captured in a CUDA graph.
    """

    def prepare(self, ctx, params):
        if ctx.settings.get("cuda_graphs"):
            raise ValueError(
                "attention-split reads lengths on the host and cannot be captured; set cuda_graphs to False"
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
        self.pieces = params["pieces"]

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
            out[i] = _split(q[i] * self.scale, k, v, self.pieces)
        return out


def _typed(cache, like):
    return cache if cache.dtype == like.dtype else cache.to(like.dtype)


def _rotate(x, cos, sin):
    """Rotary embedding; x [num_seqs, heads, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _split(q, k, v, pieces):
    """q [kv_heads, groups, head_dim], k and v [kv_heads, length, head_dim]; the last piece also takes what does not divide."""
    kv_heads, length, head_dim = k.shape
    piece = length // pieces
    even = (kv_heads, pieces, piece, head_dim)
    # The strides are written out because a slice of the cache is not contiguous across heads.
    strides = (k.stride(0), piece * k.stride(1), k.stride(1), k.stride(2))
    scores = torch.matmul(q[:, None], k.as_strided(even, strides, k.storage_offset()).transpose(2, 3)).float()
    top = scores.amax(dim=-1, keepdim=True)
    weights = (scores - top).exp_()
    sums = weights.sum(dim=-1, keepdim=True)
    v_strides = (v.stride(0), piece * v.stride(1), v.stride(1), v.stride(2))
    mixed = torch.matmul(weights.to(v.dtype), v.as_strided(even, v_strides, v.storage_offset())).float()
    if piece * pieces < length:
        rest = torch.matmul(q, k[:, piece * pieces :].transpose(1, 2)).float()[:, None]
        rest_top = rest.amax(dim=-1, keepdim=True)
        rest_weights = (rest - rest_top).exp_()
        rest_mixed = torch.matmul(rest_weights.to(v.dtype), v[:, None, piece * pieces :]).float()
        top = torch.cat([top, rest_top], dim=1)
        sums = torch.cat([sums, rest_weights.sum(dim=-1, keepdim=True)], dim=1)
        mixed = torch.cat([mixed, rest_mixed], dim=1)
    share = (top - top.amax(dim=1, keepdim=True)).exp_()
    return (mixed * share).sum(dim=1) / (sums * share).sum(dim=1)
