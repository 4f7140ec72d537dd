"""Where operator times come from: one interface, the roofline as its plainest implementation.

Every answer carries its provenance and a spread (one standard deviation of log time). The roofline's efficiencies are the medians
of published kernel tables (matrix products at half to 0.8 of the peak, weight streaming at 0.7 to 0.9), and its spread is as wide
as those medians vary between machines.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.machine import Machine
from costmodel.operators import bounds

Floats = NDArray[np.float64]


class Provenance(IntEnum):
    """Ordered: a sum is no better than its worst part."""

    MEASURED = 0
    """Interpolated between measured kernels."""
    CALIBRATED = 1
    EXTRAPOLATED = 2
    """Beyond the measured points, along the roofline."""
    ROOFLINE = 3
    """No measurement of such a kernel."""

    @property
    def label(self) -> str:
        return ("measured kernels", "calibrated", "extrapolated", "roofline")[self]


SPREAD = np.array([0.12, 0.12, 0.30, 0.45])
"""Standard deviation of log time by provenance. Measured kernels: tables of one kernel in two releases of a framework differ by
about that much; the roofline: the spread of published efficiencies around the medians used here."""


class Timed(NamedTuple):
    """Times of one operator for many queries."""

    seconds: Floats
    provenance: NDArray[np.int8]


class OperatorSource(Protocol):
    """Times of operators on one accelerator; arguments broadcast."""

    name: str
    machine: Machine
    expands_latents: bool
    """Whether latent attention writes out the keys and values of every head for the whole context in each pass, as transformers' own
    modules do; otherwise heads read the latent itself (absorbed), as serving engines do."""

    def gemm(self, fmt: str, m: Floats, n: Floats, k: Floats) -> Timed: ...

    def moe(
        self, fmt: str, tokens: Floats, hidden: int, inter: int, topk: int, num_experts: int, tp: Floats, ep: Floats, matrices: float
    ) -> Timed: ...  # fmt: skip

    def context_attention(
        self, batch: Floats, tokens: Floats, heads: Floats, kv_heads: Floats, head_dim: int, window: int, past: Floats
    ) -> Timed: ...

    def decode_attention(
        self,
        batch: Floats,
        context: Floats,
        heads: Floats,
        kv_heads: Floats,
        head_dim: int,
        window: int,
        kv_bytes: float,
    ) -> Timed: ...

    def mla_context(self, batch: Floats, tokens: Floats, heads: Floats) -> Timed: ...

    def mla_decode(self, batch: Floats, context: Floats, heads: Floats, kv_bytes: float) -> Timed: ...

    def all_reduce(self, ranks: Floats, bytes_: Floats) -> Timed: ...

    def exchange(self, ranks: Floats, bytes_: Floats) -> Timed: ...

    def stream(self, bytes_: Floats) -> Timed: ...

    def mix(self, fmt: str, flop: Floats, bytes_: Floats) -> Timed:
        """Anything else, by its arithmetic and bytes (recurrences, sparse and compressed attention, indexers)."""
        ...


class Roofline:
    """Peaks times typical efficiencies, plus a launch."""

    MEMORY, COMPUTE, LINK = 0.75, 0.6, 0.75
    expands_latents = False

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.name = f"roofline of {machine.name}"
        self.launch = 2e-6 if machine.flops["bf16"] > 1e13 else 0.0
        """Shortest kernel on a GPU (tables' smallest times are 1.8 to 8 µs); a CPU calls a function."""
        self.hop = 5e-6 if machine.flops["bf16"] > 1e13 else 0.0
        """Shortest collective (tables' smallest all-reduces are 4 to 9 µs)."""
        self.far_hop = 5 * self.hop
        """Shortest collective across domains: NCCL's own estimate for 128 bytes over two nodes of eight H100 is 25 µs (NVIDIA/nccl issue
        1453); tests of such clusters print 20 to 60."""

    def _timed(self, bound: Floats, efficiency: float, floor: Floats | float) -> Timed:
        bound = np.asarray(bound, np.float64)
        return Timed(floor + bound / efficiency, np.full(bound.shape, Provenance.ROOFLINE, np.int8))

    def gemm(self, fmt: str, m: Floats, n: Floats, k: Floats) -> Timed:
        return self._timed(bounds.gemm(self.machine, fmt, m, n, k), self.COMPUTE, self.launch)

    def moe(
        self, fmt: str, tokens: Floats, hidden: int, inter: int, topk: int, num_experts: int, tp: Floats, ep: Floats, matrices: float
    ) -> Timed:  # fmt: skip
        bound = bounds.moe(self.machine, fmt, tokens, hidden, inter, topk, num_experts, tp, ep, matrices)
        return self._timed(bound, self.COMPUTE, 4 * self.launch)

    def context_attention(
        self, batch: Floats, tokens: Floats, heads: Floats, kv_heads: Floats, head_dim: int, window: int, past: Floats
    ) -> Timed:
        bound = bounds.context_attention(self.machine, batch, tokens, heads, kv_heads, head_dim, window, past)
        return self._timed(bound, self.COMPUTE, self.launch)

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
        return self._timed(bound, self.COMPUTE, 2 * self.launch)

    def mla_context(self, batch: Floats, tokens: Floats, heads: Floats) -> Timed:
        return self._timed(bounds.mla_context(self.machine, batch, tokens, heads), self.COMPUTE, self.launch)

    def mla_decode(self, batch: Floats, context: Floats, heads: Floats, kv_bytes: float) -> Timed:
        return self._timed(
            bounds.mla_decode(self.machine, batch, context, heads, kv_bytes), self.COMPUTE, 2 * self.launch
        )

    def all_reduce(self, ranks: Floats, bytes_: Floats) -> Timed:
        return self._collective(bounds.all_reduce(self.machine, ranks, bytes_), ranks)

    def exchange(self, ranks: Floats, bytes_: Floats) -> Timed:
        return self._collective(bounds.exchange(self.machine, ranks, bytes_), ranks)

    def _collective(self, bound: Floats, ranks: Floats) -> Timed:
        return self._timed(bound, self.LINK, np.where(np.asarray(ranks) <= self.machine.domain, self.hop, self.far_hop))

    def stream(self, bytes_: Floats) -> Timed:
        return self._timed(bounds.stream(self.machine, bytes_), self.MEMORY, self.launch)

    def mix(self, fmt: str, flop: Floats, bytes_: Floats) -> Timed:
        bound: ArrayLike = np.maximum(
            np.asarray(flop) / self.machine.peak(fmt), np.asarray(bytes_) / self.machine.memory_bytes_per_s
        )
        return self._timed(np.asarray(bound, np.float64), 0.5, self.launch)
