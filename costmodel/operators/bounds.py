"""Roofline bounds: the seconds that an operator's arithmetic or its bytes take at an accelerator's peaks, whichever is more.

The same functions bound a query and the rows of a table, so that an efficiency means the same in both. All arguments broadcast;
everything is for one accelerator's share of the operator.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.graph import BYTES
from costmodel.machine import Machine

Floats = NDArray[np.float64]


def _f(value: ArrayLike) -> Floats:
    return np.asarray(value, np.float64)


def _roofline(machine: Machine, fmt: str, flop: Floats, bytes_: Floats) -> Floats:
    return np.maximum(flop / machine.peak(fmt), bytes_ / machine.memory_bytes_per_s)


def gemm(machine: Machine, fmt: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
    """m tokens through a k x n weight; activations in bf16."""
    m, n, k = _f(m), _f(n), _f(k)
    return _roofline(machine, fmt, 2 * m * n * k, n * k * BYTES[fmt] + 2.0 * m * (n + k))


def moe(
    machine: Machine,
    fmt: str,
    tokens: ArrayLike,
    hidden: ArrayLike,
    inter: ArrayLike,
    topk: ArrayLike,
    num_experts: ArrayLike,
    tp: ArrayLike,
    ep: ArrayLike,
    matrices: float = 3.0,
) -> Floats:
    """Routed experts of one rank: `tokens` of the whole group, uniformly routed; an expert's weights are read once if any token
    chose it. `matrices`: 3 for gated experts, 2 for plain ones."""
    tokens, hidden, inter = _f(tokens), _f(hidden), _f(inter)
    topk, num_experts, tp, ep = _f(topk), _f(num_experts), _f(tp), _f(ep)
    one = matrices * hidden * inter / tp
    touched = num_experts / ep * (1.0 - (1.0 - topk / num_experts) ** tokens)
    routed = tokens * topk / ep
    return _roofline(
        machine, fmt, 2 * routed * one, touched * one * BYTES[fmt] + 2.0 * routed * (2 * hidden + inter / tp)
    )


def context_attention(
    machine: Machine, batch: ArrayLike, tokens: ArrayLike, heads: ArrayLike, kv_heads: ArrayLike, head_dim: ArrayLike,
    window: ArrayLike = 0, past: ArrayLike = 0,
) -> Floats:  # fmt: skip
    """Causal attention of `tokens` new tokens a sequence over themselves and `past` ones; `window` 0: all of them."""
    batch, tokens, past, window = _f(batch), _f(tokens), _f(past), _f(window)
    pairs = tokens * (past + tokens / 2)
    limit = np.where(window > 0, window, np.inf)
    pairs = np.minimum(pairs, tokens * limit)
    heads, kv_heads, head_dim = _f(heads), _f(kv_heads), _f(head_dim)
    moved = 2.0 * batch * head_dim * (2 * tokens * heads + 2 * (tokens + past) * kv_heads)
    return _roofline(machine, "bf16", 4 * batch * pairs * heads * head_dim, moved)


def decode_attention(
    machine: Machine, batch: ArrayLike, context: ArrayLike, heads: ArrayLike, kv_heads: ArrayLike, head_dim: ArrayLike,
    kv_bytes: float, window: ArrayLike = 0,
) -> Floats:  # fmt: skip
    """One query a sequence over a cache of `context` tokens."""
    batch, context, window = _f(batch), _f(context), _f(window)
    read = np.where(window > 0, np.minimum(context, window), context)
    heads, kv_heads, head_dim = _f(heads), _f(kv_heads), _f(head_dim)
    moved = 2 * batch * read * kv_heads * head_dim * kv_bytes
    return _roofline(machine, "bf16", 4 * batch * read * heads * head_dim, moved)


def mla_context(machine: Machine, batch: ArrayLike, tokens: ArrayLike, heads: ArrayLike) -> Floats:
    """DeepSeek's 192-wide keys and 128-wide values, expanded for every head (source: DeepSeek-V2, 2024)."""
    batch, tokens, heads = _f(batch), _f(tokens), _f(heads)
    flop = 2 * batch * tokens * (tokens / 2) * heads * (192 + 128)
    return _roofline(machine, "bf16", flop, 2.0 * batch * tokens * heads * (192 + 192 + 128 + 128))


def mla_decode(machine: Machine, batch: ArrayLike, context: ArrayLike, heads: ArrayLike, kv_bytes: float) -> Floats:
    """Absorbed: every head reads the same latent of 512 + 64."""
    batch, context, heads = _f(batch), _f(context), _f(heads)
    flop = 2 * batch * context * heads * (576 + 512)
    return _roofline(machine, "bf16", flop, batch * context * 576 * kv_bytes)


def stream(machine: Machine, bytes_: ArrayLike) -> Floats:
    """Bytes read or written once."""
    return _f(bytes_) / machine.memory_bytes_per_s


def link_rate(machine: Machine, ranks: ArrayLike) -> Floats:
    """Bytes/s of one rank: the scale-up rate within a domain, the scale-out rate beyond."""
    return np.where(_f(ranks) <= machine.domain, machine.scale_up_bytes_per_s, max(machine.scale_out_bytes_per_s, 1.0))


def all_reduce(machine: Machine, ranks: ArrayLike, bytes_: ArrayLike) -> Floats:
    """Ring or switch: every byte leaves each rank 2 (n - 1) / n times."""
    ranks = _f(ranks)
    return 2 * (ranks - 1) / ranks * _f(bytes_) / link_rate(machine, ranks)


def exchange(machine: Machine, ranks: ArrayLike, bytes_: ArrayLike) -> Floats:
    """All-gather, reduce-scatter or all-to-all: `bytes_` that a rank sends or receives in all, (n - 1) / n of them over the link."""
    ranks = _f(ranks)
    return (ranks - 1) / ranks * _f(bytes_) / link_rate(machine, ranks)
