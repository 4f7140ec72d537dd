"""A step of the model as a sum of named operators, for many plans at once.

    tokens of one attention group ──► per layer: mixer (projections, cache or state, output, all-reduce)
                                                 feed-forward (dense, or router, dispatch, experts, combine)
                                  ──► head (last tokens only)

Prefill and decode are priced apart; the serving model mixes them. Not here: sampling, scheduling and whatever else the host does
between steps (a calibration learns it), and the overlap of communication with computing (none is assumed).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from costmodel.graph import Attention, AttentionKind, Layer, Matrix, ModelGraph, Role
from costmodel.operators.layout import Layout
from costmodel.operators.source import SPREAD, Floats, OperatorSource, Timed

ACTIVATION_BYTES = 2.0
WIDE = 4.0
"""Of an activation where the head's weights are fp32; all other formats compute in 16 bits."""


class Kind(StrEnum):
    """Groups that a calibration corrects and a report adds up."""

    GEMM = "gemm"
    ATTENTION = "attention"
    STATE = "state"
    EXPERTS = "experts"
    COMMUNICATION = "communication"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator over all layers of its kind."""

    name: str
    """As `gqa+moe/qkv`."""
    kind: Kind
    seconds: Floats
    """[plans], of all its calls in one pass through the model."""
    calls: int
    """In one pass: the layers that have it."""
    provenance: NDArray[np.int8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One pass through the model."""

    operators: tuple[Operator, ...]

    @property
    def seconds(self) -> Floats:
        return np.asarray(sum(operator.seconds for operator in self.operators), np.float64)

    @property
    def calls(self) -> int:
        """Operators that the host starts in one pass."""
        return sum(operator.calls for operator in self.operators)

    def by_kind(self) -> dict[Kind, Floats]:
        return {kind: self._sum([o for o in self.operators if o.kind is kind]) for kind in Kind}

    def _sum(self, chosen: list[Operator]) -> Floats:
        zero = np.zeros_like(self.operators[0].seconds)
        return np.asarray(sum((o.seconds for o in chosen), zero), np.float64)

    def spread(self) -> Floats:
        """Standard deviation of the log of the sum: errors of one kind stand together, kinds are independent."""
        total, square = self.seconds, np.zeros_like(self.operators[0].seconds)
        for kind in Kind:
            chosen = [o for o in self.operators if o.kind is kind]
            error = np.asarray(sum((o.seconds * SPREAD[o.provenance] for o in chosen), np.zeros_like(total)))
            square = square + (error / total) ** 2
        return np.sqrt(square)

    def worst(self) -> NDArray[np.int8]:
        """Provenance of the sum: the worst of the operators that make up at least a tenth of it."""
        worst = np.zeros(self.seconds.shape, np.int8)
        for operator in self.operators:
            worst = np.where(operator.seconds >= 0.1 * self.seconds, np.maximum(worst, operator.provenance), worst)
        return worst


def step(
    graph: ModelGraph, layout: Layout, source: OperatorSource, *, decode: bool, sequences: Floats, tokens: Floats, past: Floats,
    kv_bytes: float = 2.0,
) -> Step:  # fmt: skip
    """One pass for `sequences` of each attention group with `tokens` new tokens each after `past` cached ones (decode: 1, or 1 and its
    drafts, which read the cache together, as further heads would)."""
    pass_ = _Pass(graph, layout, source, decode, sequences, tokens, past, kv_bytes)
    operators: list[Operator] = []
    for count, layer in graph.layers:
        operators += pass_.layer(layer, count)
    operators += pass_.ends()
    return Step(operators=tuple(operators))


class _Pass:
    """What all operators of one pass share."""

    def __init__(
        self, graph: ModelGraph, layout: Layout, source: OperatorSource, decode: bool, sequences: Floats, tokens: Floats,
        past: Floats, kv_bytes: float,
    ) -> None:  # fmt: skip
        self.graph, self.layout, self.source, self.decode, self.kv_bytes = graph, layout, source, decode, kv_bytes
        self.tp = layout.tp.astype(float)
        self.sequences, self.tokens, self.past = (
            np.broadcast_to(np.asarray(v, float), self.tp.shape) for v in (sequences, tokens, past)
        )
        self.m = self.sequences * self.tokens
        head = next(m for m in graph.ends if m.role is Role.HEAD)
        self.width = WIDE if head.format == "fp32" else ACTIVATION_BYTES

    def layer(self, layer: Layer, count: int) -> list[Operator]:
        made: list[tuple[str, Kind, Timed]] = []
        experts = {m.role: m for m in layer.matrices if m.copies > 1}
        for matrix in layer.matrices:
            if matrix.copies == 1:
                made.append((matrix.name, Kind.GEMM, self.product(matrix, layer)))
        up = next((m for m in layer.matrices if m.name == "kv_up"), None)
        if layer.attention is not None and up is not None and self.source.expands_latents:
            made += self.expanded(layer.attention, up)
        elif layer.attention is not None:
            made += self.attention(layer.attention)
        elif layer.state_bytes:
            made.append(("recurrence", Kind.STATE, self.recurrence(layer.state_bytes)))
        if experts:
            made += self.experts(layer, experts[Role.EXPERT_GATE_UP], experts[Role.EXPERT_DOWN])
        made += self.elementwise(layer)
        made += self.reductions(layer, bool(experts))
        return [
            Operator(
                name=f"{layer.kind}/{name}",
                kind=kind,
                seconds=count * timed.seconds,
                calls=count,
                provenance=timed.provenance,
            )
            for name, kind, timed in made
        ]

    def product(self, matrix: Matrix, layer: Layer) -> Timed:
        k, n = sharded(matrix, layer.attention, self.tp)
        return self.source.gemm(matrix.format, self.m, n, k)

    def attention(self, a: Attention) -> list[tuple[str, Kind, Timed]]:
        heads = np.ceil(a.heads / self.tp)
        asking = heads * self.tokens if self.decode else heads
        kv_heads = np.maximum(1.0, np.ceil(a.kv_heads / self.tp))
        made: list[tuple[str, Kind, Timed]] = []
        context = self.past + (1.0 if self.decode else 0.0)
        share = context / self.layout.dcp if self.decode else context
        limit = np.inf if a.read_tokens is None else float(a.read_tokens)
        if a.kind is AttentionKind.COMPRESSED:
            made.append(("attention", Kind.ATTENTION, self.compressed(a, heads)))
        elif a.kind is AttentionKind.MLA and self.decode:
            timed = self.source.mla_decode(self.sequences, np.minimum(share, limit), asking, self.kv_bytes)
            made.append(("attention", Kind.ATTENTION, timed))
        elif a.kind is AttentionKind.MLA:
            timed = self.source.mla_context(self.sequences, self.tokens, heads)
            pairs = self.tokens * (self.past + self.tokens / 2)
            # Earlier tokens and sparse reading change the pairs of query and key; the kernel's efficiency is taken to stay.
            scale = np.minimum(pairs, self.tokens * limit) / (self.tokens * self.tokens / 2)
            made.append(("attention", Kind.ATTENTION, Timed(timed.seconds * scale, timed.provenance)))
        elif self.decode:
            window = a.window or 0
            timed = self.source.decode_attention(
                self.sequences, np.minimum(share, limit), asking, kv_heads, a.head_dim, window, self.kv_bytes
            )
            made.append(("attention", Kind.ATTENTION, timed))
        else:
            window = int(min(a.window or np.inf, limit)) if np.isfinite(min(a.window or np.inf, limit)) else 0
            timed = self.source.context_attention(
                self.sequences, self.tokens, heads, kv_heads, a.head_dim, window, self.past
            )
            made.append(("attention", Kind.ATTENTION, timed))
        if a.index_dim and a.index_heads:
            made.append(("indexer", Kind.ATTENTION, self.indexer(a)))
        if self.decode and (self.layout.dcp > 1).any():
            # Every rank asks with all queries and the partial outputs are summed with their weights.
            bytes_ = np.where(self.layout.dcp > 1, 2 * self.m * heads * a.head_dim * self.width, 0.0)
            timed = self.source.exchange(np.maximum(self.layout.dcp, 2), bytes_)
            seconds = np.where(self.layout.dcp > 1, 2 * timed.seconds, 0.0)
            made.append(("context_parallel", Kind.COMMUNICATION, Timed(seconds, timed.provenance)))
        return made

    def expanded(self, a: Attention, up: Matrix) -> list[tuple[str, Kind, Timed]]:
        """Latent attention that writes out keys and values of every head. `up` has been counted for the new tokens; here it runs for the
        cached ones, and the keys get their rotary part by a copy of them all."""
        heads, rope = np.ceil(a.heads / self.tp), a.head_dim - up.k
        past = self.sequences * self.past
        again = self.source.gemm(up.format, np.maximum(past, 1.0), np.ceil(up.n / self.tp), np.full_like(self.tp, up.k))
        copied = self.source.stream(2 * (past + self.m) * heads * (up.n / a.heads + rope) * self.width)
        width = int(up.n / a.heads + rope) // 2
        context = self.past + self.tokens
        attention = (
            self.source.decode_attention(self.sequences, context, heads, heads, width, 0, self.kv_bytes)
            if self.decode
            else self.source.context_attention(self.sequences, self.tokens, heads, heads, width, 0, self.past)
        )
        return [
            ("kv_up_cached", Kind.GEMM, Timed(np.where(past > 0, again.seconds, 0.0), again.provenance)),
            ("kv_copy", Kind.ELEMENTWISE, copied),
            ("attention", Kind.ATTENTION, attention),
        ]

    def compressed(self, a: Attention, heads: Floats) -> Timed:
        """DeepSeek-V4's window and compressed entries, by arithmetic and bytes."""
        context = self.past + self.tokens / 2
        window = np.minimum(context, float(a.window or 0))
        beyond = context / a.compress_ratio if a.compress_ratio > 1 else np.zeros_like(context)
        read = window + (np.minimum(beyond, a.read_tokens) if a.read_tokens is not None else beyond)
        entry = a.entry_bytes(self.kv_bytes)
        held = self.sequences * (read if self.decode else self.past + self.tokens) * entry
        return self.source.mix("bf16", 4 * self.m * read * heads * a.head_dim, held + self.m * heads * a.head_dim * 4.0)

    def indexer(self, a: Attention) -> Timed:
        context = (self.past + self.tokens / 2) / (a.compress_ratio if a.kind is AttentionKind.COMPRESSED else 1)
        flop = 2 * self.m * context * a.index_heads * a.index_dim
        return self.source.mix("fp8", flop, self.sequences * (self.past + self.tokens) * a.index_bytes_per_token)

    def recurrence(self, state_bytes: float) -> Timed:
        """Read and written once a sequence in decode, once a chunk of 64 tokens in prefill."""
        passes = 1.0 if self.decode else np.maximum(1.0, self.tokens / 64)
        moved = 2 * self.sequences * passes * state_bytes / self.tp
        return self.source.mix("bf16", 8 * self.m * state_bytes / 4 / self.tp, moved)

    def experts(self, layer: Layer, gate_up: Matrix, down: Matrix) -> list[tuple[str, Kind, Timed]]:
        layout = self.layout
        group = layout.dp.astype(float)
        timed = self.source.moe(
            down.format, self.m * group, gate_up.k, down.k, layer.top_k, layer.num_experts, layout.moe_tp.astype(float),
            layout.ep.astype(float), 3.0 if gate_up.n > down.k else 2.0,
        )  # fmt: skip
        made = [("experts", Kind.EXPERTS, timed)]
        spread = layout.dp > 1
        if spread.any():
            ranks = np.maximum(layout.tp * layout.dp, 2).astype(float)
            width = float(gate_up.k)
            reached = layout.ep * (1.0 - (1.0 - 1.0 / layout.ep) ** layer.top_k)
            sent = self.m / self.tp * reached * width
            gathered = self.m * group / self.tp * width
            # Dispatch in the experts' width (8 bits where weights have so many or fewer), combine in 16.
            per_value = 1.0 if down.format != "bf16" else self.width
            volume = np.where(layout.all_to_all, sent, gathered)
            out, back = (
                self.source.exchange(ranks, volume * per_value),
                self.source.exchange(ranks, volume * self.width),
            )
            made += [
                ("dispatch", Kind.COMMUNICATION, Timed(np.where(spread, out.seconds, 0.0), out.provenance)),
                ("combine", Kind.COMMUNICATION, Timed(np.where(spread, back.seconds, 0.0), back.provenance)),
            ]
        return made

    def reductions(self, layer: Layer, routed: bool) -> list[tuple[str, Kind, Timed]]:
        """Sums over tensor-parallel ranks: norms across heads, after the mixer's output, and after the feed-forward."""
        tp = self.tp
        if not (tp > 1).any():
            return []
        timed = self.source.all_reduce(np.maximum(tp, 2), self.m * self.graph.hidden * self.width)
        made: list[tuple[str, Kind, Timed]] = []
        if layer.attention is not None and layer.attention.norm_across_heads:
            # The sums of squares of queries and keys, two numbers of fp32 a token.
            small = self.source.all_reduce(np.maximum(tp, 2), self.m * 8.0)
            made.append(
                ("reduce_norm", Kind.COMMUNICATION, Timed(np.where(tp > 1, small.seconds, 0.0), small.provenance))
            )
        mixes = any(m.role in (Role.ATTENTION_OUT, Role.LINEAR_OUT) for m in layer.matrices)
        feeds = any(m.role is Role.DOWN for m in layer.matrices)
        if mixes:
            made.append(
                ("reduce_mixer", Kind.COMMUNICATION, Timed(np.where(tp > 1, timed.seconds, 0.0), timed.provenance))
            )
        if feeds or routed:
            apart = (tp > 1) & ((self.layout.dp == 1) | feeds)
            made.append(
                ("reduce_ffn", Kind.COMMUNICATION, Timed(np.where(apart, timed.seconds, 0.0), timed.provenance))
            )
        return made

    def elementwise(self, layer: Layer) -> list[tuple[str, Kind, Timed]]:
        """Norms with their residuals (read two, write two), rotary and cache write, activation of a dense feed-forward."""
        hidden = self.source.stream(4 * self.m * self.graph.hidden * self.width)
        made = []
        if any(m.role in (Role.ATTENTION_OUT, Role.LINEAR_OUT) for m in layer.matrices):
            made.append(("norm_mixer", Kind.ELEMENTWISE, hidden))
            width = sum(m.n for m in layer.matrices if m.role in (Role.QKV, Role.LINEAR_IN, Role.LATENT_UP))
            made.append(("rotary", Kind.ELEMENTWISE, self.source.stream(2 * self.m * width / self.tp * self.width)))
        if layer.attention is not None and layer.attention.index_heads:
            # Norm, rotary, quantisation and cache write of the indexer's key, and the choice of the best.
            made.append(
                ("index_steps", Kind.ELEMENTWISE, self.many(5, layer.attention.index_dim * layer.attention.index_heads))
            )
        if layer.attention is None and layer.state_bytes:
            # Short convolution, gates, norm of the output.
            made.append(("recurrence_steps", Kind.ELEMENTWISE, self.many(3, self.graph.hidden)))
        if layer.num_experts:
            # Choice of the experts, and sorting the tokens by them.
            made.append(("routing", Kind.ELEMENTWISE, self.many(2, layer.num_experts)))
        width = sum(m.k for m in layer.matrices if m.role is Role.DOWN)
        if width or layer.num_experts:
            made.append(("norm_ffn", Kind.ELEMENTWISE, hidden))
        if width:
            made.append(("activation", Kind.ELEMENTWISE, self.source.stream(3 * self.m * width / self.tp * self.width)))
        return made

    def many(self, calls: int, width: int) -> Timed:
        """Small kernels that read and write `width` values a token."""
        one = self.source.stream(2 * self.m * width * self.width)
        return Timed(calls * one.seconds, one.provenance)

    def ends(self) -> list[Operator]:
        head = next(m for m in self.graph.ends if m.role is Role.HEAD)
        asked = self.m if self.decode else self.sequences
        made = [
            ("head", Kind.GEMM, self.source.gemm(head.format, asked, np.ceil(head.n / self.tp), np.full_like(self.tp, head.k))),
            ("embed", Kind.ELEMENTWISE, self.source.stream(2 * self.m * self.graph.hidden * self.width)),
        ]  # fmt: skip
        if (self.layout.pp > 1).any():
            hops = self.layout.pp - 1
            one = self.source.exchange(
                np.full_like(self.tp, 2.0), 2 * self.m * self.graph.hidden * self.width / self.tp
            )
            made.append(("pipeline", Kind.COMMUNICATION, Timed(hops * one.seconds, one.provenance)))
        return [Operator(name=n, kind=k, seconds=t.seconds, calls=1, provenance=t.provenance) for n, k, t in made]


def sharded(matrix: Matrix, attention: Attention | None, tp: Floats) -> tuple[Floats, Floats]:
    """(k, n) of one rank under tensor parallelism. Key and value heads are copied once ranks outnumber them; latent down-projections,
    indexers, routers and the experts' latent projections are whole on every rank."""
    k, n = np.full_like(tp, matrix.k), np.full_like(tp, matrix.n)
    match matrix.role:
        case Role.QKV if attention is not None:
            shared = attention.kv_heads * (attention.head_dim + attention.v_head_dim)
            shared = min(shared, matrix.n)
            return k, np.ceil((matrix.n - shared) / tp + shared / np.minimum(tp, attention.kv_heads))
        case Role.QKV | Role.LATENT_UP | Role.LINEAR_IN | Role.GATE_UP | Role.HEAD:
            return k, np.ceil(n / tp)
        case Role.ATTENTION_OUT if matrix.name == "o_down":
            return k, np.ceil(n / tp)
        case Role.ATTENTION_OUT | Role.LINEAR_OUT | Role.DOWN:
            return np.ceil(k / tp), n
        case _:
            return k, n
