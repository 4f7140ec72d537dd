"""Plans: every way to place a model on the accelerators at hand, as arrays, and which of them are possible.

Three answers are kept apart: a plan that *does not fit* (memory), one that *misses the SLO* (speed), and *unknown* (the cost model
cannot say). Divisibility and domains are rules, not guesses: tensor parallelism and the ranks that share experts stay within one
scale-up domain; only pipeline stages and replicas cross domains; a domain is what the hardware says, however many nodes there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.graph import BYTES, AttentionKind, ModelGraph, Role
from costmodel.machine import Machine
from costmodel.operators.layout import NAMES, Layout

Floats = NDArray[np.float64]

WHOLE = (Role.LATENT_DOWN, Role.INDEXER, Role.ROUTER, Role.EXPERT_LATENT)
"""Matrices that every tensor-parallel rank holds whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on the fullest accelerator, [plans]."""

    weights: Floats
    cache: Floats
    working: Floats
    """Activations of the largest step and what the runtime reserves."""

    @property
    def total(self) -> Floats:
        return self.weights + self.cache + self.working


def enumerate_layouts(graph: ModelGraph, machine: Machine) -> tuple[Layout, Counter[str]]:
    """All layouts of one replica that the model's shapes and the domains allow, and how many were left out for which reason."""
    heads = [layer.attention.heads for _, layer in graph.layers if layer.attention]
    num_experts = max(layer.num_experts for _, layer in graph.layers)
    sizes = _sizes(min(machine.domain, machine.num_devices))
    pruned: Counter[str] = Counter()
    rows: list[tuple[int, int, int, int, int, int, bool]] = []
    for tp in sizes:
        if any(count % tp for count in heads):
            pruned["tensor parallelism does not divide the attention heads"] += 1
            continue
        for dp in sizes if num_experts else [1]:
            group = tp * dp
            if group > min(machine.domain, machine.num_devices):
                pruned["the ranks that share experts do not fit into one scale-up domain"] += 1
                continue
            for pp in (1, 2, 4, 8):
                if group * pp > machine.num_devices or (
                    group * pp > machine.domain and not machine.scale_out_bytes_per_s
                ):
                    pruned["more accelerators than there are"] += 1
                    continue
                if pp > graph.num_layers:
                    pruned["more pipeline stages than layers"] += 1
                    continue
                for ep in [size for size in (1, *sizes) if group % size == 0] if num_experts else [1]:
                    if num_experts and num_experts % ep:
                        pruned["expert parallelism does not divide the experts"] += 1
                        continue
                    for dcp in _context_shares(graph, tp):
                        rows += [
                            (tp, dp, pp, group // ep, ep, dcp, way)
                            for way in ((False, True) if dp > 1 and ep > 1 else (False,))
                        ]
    unique = sorted(set(rows))
    columns = list(zip(*unique, strict=True))
    arrays = {name: np.array(column) for name, column in zip(NAMES, columns, strict=True)}
    return Layout(**arrays), pruned


def _sizes(limit: int) -> list[int]:
    """Group sizes: powers of two, and the divisors of a domain that is none (72: 9, 12, 18, 24, 36, 72)."""
    powers = [2**i for i in range(11) if 2**i <= limit]
    return sorted({*powers, *(n for n in (12, 18, 24, 36, 72) if n <= limit and limit >= 72)})


def _context_shares(graph: ModelGraph, tp: int) -> list[int]:
    """Decode context parallelism spreads copies of a cache, so it needs copies: `tp` beyond the key-value heads."""
    kinds = [layer.attention for _, layer in graph.layers if layer.attention]
    copies = min((tp // min(tp, a.kv_heads) for a in kinds if a.kind is not AttentionKind.COMPRESSED), default=1)
    return [share for share in (1, 2, 4, 8) if share <= copies]


def memory_of(
    graph: ModelGraph, layout: Layout, *, concurrency: Floats, context: float, kv_bytes: float, chunk_tokens: int,
    reserved_bytes: float,
) -> Memory:  # fmt: skip
    """Bytes on one accelerator with the weights' formats as in the graph and `concurrency` sequences of `context` tokens a replica."""
    tp, pp, dcp = layout.tp.astype(float), layout.pp.astype(float), layout.dcp.astype(float)
    shards = (layout.moe_tp * layout.ep).astype(float)
    weights = np.zeros_like(tp)
    cache = np.zeros_like(tp)
    for count, layer in graph.layers:
        for m in layer.matrices:
            divided = shards if m.copies > 1 else (np.ones_like(tp) if m.role in WHOLE else tp)
            weights = weights + count * m.params * BYTES[m.format] / divided
        if layer.attention is not None:
            held = layer.attention.cache_bytes(int(context), kv_bytes)
            cache = cache + count * held / np.minimum(tp, layer.attention.kv_heads) / dcp
        cache = cache + count * layer.state_bytes / tp
    ends = sum(m.params * BYTES[m.format] for m in graph.ends) / tp
    each = np.ceil(concurrency / layout.dp)
    working = reserved_bytes + 12.0 * chunk_tokens * graph.hidden + 4.0 * np.minimum(each, 1024.0) * graph.vocab / tp
    return Memory(weights=weights / pp + ends, cache=cache / pp * each, working=working)


def with_formats(graph: ModelGraph, precision: str | None) -> ModelGraph:
    """The graph with weights of another precision: `fp32`, `bf16`, `fp8`, `fp8_block`, `nvfp4` or `int4`. Head, embedding and router stay;
    latent attention stays too under 4 bits, as published checkpoints do. None: as shipped."""
    if precision is None:
        return graph
    from dataclasses import replace

    from hotpass.errors import InputError, nearest

    known = ("fp32", "bf16", "fp8", "fp8_block", "nvfp4", "int4")
    if precision not in known:
        raise InputError("--precision", precision, "is not a weight format", nearest(precision, list(known)))
    narrow = precision in ("nvfp4", "int4")
    latent = any(layer.attention and layer.attention.kind is not AttentionKind.GQA for _, layer in graph.layers)
    linear = any(layer.state_bytes for _, layer in graph.layers)
    routed = any(layer.num_experts for _, layer in graph.layers)
    fed: Mapping[Role, bool] = {
        role: role in (Role.GATE_UP, Role.DOWN, Role.EXPERT_GATE_UP, Role.EXPERT_DOWN) for role in Role
    }
    attention_too = not (narrow and (latent or linear or routed))

    def change(m_role: Role) -> bool:
        return m_role is not Role.ROUTER and (fed[m_role] or attention_too)

    layers = tuple(
        (
            count,
            replace(
                layer,
                matrices=tuple(
                    replace(m, format=precision) if change(m.role) else replace(m, format=_wide(m.format))
                    for m in layer.matrices
                ),
            ),
        )
        for count, layer in graph.layers
    )
    ends = tuple(replace(m, format="fp32") for m in graph.ends) if precision == "fp32" else graph.ends
    return replace(graph, layers=layers, ends=ends)


def _wide(fmt: str) -> str:
    return fmt if fmt in ("fp8", "fp8_block") else "bf16"
