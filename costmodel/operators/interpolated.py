"""Operator times from surfaces of measured kernels, whoever measured them; what no surface covers goes by the roofline.

A subclass loads: `_load_<kind>(what)` gives the surface of a kind (`gemm`, `moe`, `context`, `decode`, `mla`, `allreduce`, `stream`),
or None. Surfaces are loaded once, on first use.
"""

from __future__ import annotations

import numpy as np

from costmodel.machine import Machine
from costmodel.operators import bounds
from costmodel.operators.source import Floats, Provenance, Roofline, Timed
from costmodel.operators.surface import Surface


class Interpolated(Roofline):
    """The roofline with measured inefficiencies."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.notes: list[str] = []
        self._surfaces: dict[str, Surface | None] = {}

    def _surface(self, key: str) -> Surface | None:
        if key not in self._surfaces:
            kind, _, what = key.partition(":")
            load = getattr(self, f"_load_{kind}", None)
            loaded: Surface | None = load(what) if load is not None else None
            self._surfaces[key] = loaded
        return self._surfaces[key]

    def _measured(
        self, key: str, features: tuple[Floats | float, ...], bound: Floats, first: Floats, second: Floats | None = None
    ) -> Timed | None:
        surface = self._surface(key)
        if surface is None:
            return None
        shape = np.broadcast_shapes(bound.shape, *(np.shape(value) for value in features))
        stacked = np.stack([np.broadcast_to(np.asarray(value, float), shape).ravel() for value in features], axis=1)
        found = surface.find(
            stacked,
            np.broadcast_to(first, shape).ravel(),
            None if second is None else np.broadcast_to(second, shape).ravel(),
        )
        seconds = np.exp(found.log_ratio).reshape(shape) * (surface.floor_seconds + bound)
        provenance = np.where(found.extrapolated, Provenance.EXTRAPOLATED, Provenance.MEASURED).astype(np.int8)
        return Timed(seconds, provenance.reshape(shape))

    def gemm(self, fmt: str, m: Floats, n: Floats, k: Floats) -> Timed:
        bound = bounds.gemm(self.machine, fmt, m, n, k)
        return self._measured(f"gemm:{fmt}", (n, k), bound, m) or super().gemm(fmt, m, n, k)

    def moe(
        self, fmt: str, tokens: Floats, hidden: int, inter: int, topk: int, num_experts: int, tp: Floats, ep: Floats, matrices: float
    ) -> Timed:  # fmt: skip
        bound = bounds.moe(self.machine, fmt, tokens, hidden, inter, topk, num_experts, tp, ep, matrices)
        found = self._measured(
            f"moe:{fmt}/{'gated' if matrices > 2 else 'plain'}",
            (hidden, inter, topk, num_experts, tp, ep),
            bound,
            tokens,
        )
        return found or super().moe(fmt, tokens, hidden, inter, topk, num_experts, tp, ep, matrices)

    def context_attention(
        self, batch: Floats, tokens: Floats, heads: Floats, kv_heads: Floats, head_dim: int, window: int, past: Floats
    ) -> Timed:
        bound = bounds.context_attention(self.machine, batch, tokens, heads, kv_heads, head_dim, window, past)
        found = self._measured("context:", (heads, kv_heads, head_dim, window), bound, batch, tokens + past)
        return found or super().context_attention(batch, tokens, heads, kv_heads, head_dim, window, past)

    def decode_attention(
        self,
        batch: Floats,
        context: Floats,
        heads: Floats,
        kv_heads: Floats,
        head_dim: int,
        window: int,
        kv_bytes: float,
    ) -> Timed:
        bound = bounds.decode_attention(self.machine, batch, context, heads, kv_heads, head_dim, kv_bytes, window)
        key = f"decode:{'fp8' if kv_bytes <= 1 else 'bfloat16'}"
        found = self._measured(key, (heads, kv_heads, head_dim, window), bound, batch, context)
        return found or super().decode_attention(batch, context, heads, kv_heads, head_dim, window, kv_bytes)

    def mla_context(self, batch: Floats, tokens: Floats, heads: Floats) -> Timed:
        bound = bounds.mla_context(self.machine, batch, tokens, heads)
        return self._measured("mla:context/bfloat16", (heads,), bound, batch, tokens) or super().mla_context(
            batch, tokens, heads
        )

    def mla_decode(self, batch: Floats, context: Floats, heads: Floats, kv_bytes: float) -> Timed:
        bound = bounds.mla_decode(self.machine, batch, context, heads, kv_bytes)
        key = f"mla:generation/{'fp8' if kv_bytes <= 1 else 'bfloat16'}"
        return self._measured(key, (heads,), bound, batch, context) or super().mla_decode(
            batch, context, heads, kv_bytes
        )

    def all_reduce(self, ranks: Floats, bytes_: Floats) -> Timed:
        bound = bounds.all_reduce(self.machine, ranks, bytes_)
        found = self._measured("allreduce:", (ranks,), bound, np.asarray(bytes_) / 2)
        plain = super().all_reduce(ranks, bytes_)
        if found is None:
            return plain
        # Tables end at one node: across domains the link is another one, and its own bound holds.
        within = np.asarray(ranks) <= self.machine.domain
        return Timed(
            np.where(within, found.seconds, plain.seconds), np.where(within, found.provenance, plain.provenance)
        )

    def stream(self, bytes_: Floats) -> Timed:
        bound = bounds.stream(self.machine, bytes_)
        return self._measured("stream:", (1.0,), bound, np.asarray(bytes_, np.float64)) or super().stream(bytes_)
