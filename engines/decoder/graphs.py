"""CUDA graphs of the decode rows of a plan. Not tried on a GPU; its logic is tested with a capture that runs on a CPU.

    row ──static inputs, longest context──► capture ──canary: replay against eager──► replay for batches of the row's slots
    before each window: do weights and KV lie where they lay? ──no──► all are captured again, and the window does not count

A graph replays device work only: lengths come from the positions on the device, host-side facts are frozen at capture. So a graph is
used only for the slots that it was captured with, within the context that it was captured for, and only while every tensor that it
reads still lies where it lay (a part that exchanged its weights or KV afterwards would read stale memory). Addresses are compared once
a window and not once a step: reading some hundred of them takes as long as a good part of a small model's step. The serving loop uses
slots of its own, and runs without graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack

import torch

from engines.decoder.batch import Batch, build_batch
from engines.decoder.side import DecoderSide
from engines.decoder.source import failed
from hotpass.records.measurement import FailureKind

Replay = Callable[[], None]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]
"""Runs a step so that it can be replayed: the replay, and the tensor that it writes logits to."""

WARM_STEPS = 3
"""Eager steps before a capture, so that libraries have made their workspaces."""
CANARY_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest allowed difference of replay and eager, relative to the largest logit: kernels may differ, inputs may not."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CapturedRow:
    static: Batch
    """Inputs that the graph reads; its contexts are the longest that it serves."""
    replay: Replay
    logits: torch.Tensor
    counts: dict[str, int]
    """Claimed slot → calls of a part in one replay."""


class GraphedRows:
    """Answers a decode step from a graph where one was captured for it."""

    def __init__(self, side: DecoderSide, capture: Capture) -> None:
        self._side, self._capture = side, capture
        self._rows: dict[tuple[int, ...], CapturedRow] = {}
        self._addresses: tuple[int, ...] = ()

    def renew(self) -> int:
        """Capture every decode row of the plan if what graphs read has moved since the last time. How many were captured. Raises
        CandidateFailed where replay and eager differ."""
        now = addresses(self._side)
        if now == self._addresses:
            return 0
        self._rows.clear()
        for row, item in enumerate(self._side.plan.rows):
            if item.phase == "decode":
                captured = _captured(self._side, row, self._capture)
                self._rows[captured.static.host_slots] = captured
                _check_canary(self._side, row, self)
        self._side.reset_counts()
        self._addresses = now
        return len(self._rows)

    def __call__(self, batch: Batch) -> torch.Tensor | None:
        row = self._rows.get(batch.host_slots)
        if row is None or batch.phase != "decode" or batch.context > row.static.context:
            return None
        row.static.tokens.copy_(batch.tokens)
        row.static.positions.copy_(batch.positions)
        row.replay()
        if self._side.installed is not None:
            for slot, calls in row.counts.items():
                self._side.installed.counts[slot] += calls
        return row.logits


def capture_rows(side: DecoderSide, undo: ExitStack, capture: Capture | None = None) -> None:
    """Capture each decode row of the plan, after its warm-up. Raises CandidateFailed where replay and eager differ."""
    graphs = GraphedRows(side, capture or _capture_cuda)
    side.step.device_lengths = True
    undo.callback(setattr, side.step, "device_lengths", False)
    with torch.inference_mode():
        graphs.renew()
    side.graphs = graphs
    undo.callback(setattr, side, "graphs", None)


def addresses(side: DecoderSide) -> tuple[int, ...]:
    """Where the weights and the KV of a side lie: what a graph must find unchanged."""
    kv = [tensor for layer in range(side.kv.num_layers) for tensor in (side.kv.keys(layer), side.kv.values(layer))]
    return tuple(tensor.data_ptr() for tensor in (*side.net.parameters, *kv))


def _captured(side: DecoderSide, row: int, capture: Capture) -> CapturedRow:
    plan = side.plan
    last = plan.steps_per_window[row] - 1
    slots = plan.row_slots(row)
    static = build_batch(
        torch.zeros(len(slots), dtype=torch.int64, device=side.device),
        contexts=[context + last for context in plan.row_contexts(row)],
        query_lens=[1] * len(slots),
        slots=slots,
    )

    def step() -> torch.Tensor:
        side.step.begin(static)
        return side.forward(static, side.kv)

    for _ in range(WARM_STEPS):
        step()
    side.reset_counts()
    replay, logits = capture(step)
    return CapturedRow(static=static, replay=replay, logits=logits, counts=dict(side.counts()))


def _check_canary(side: DecoderSide, row: int, graphs: GraphedRows) -> None:
    """Other tokens at the row's first contexts, which are not those of the capture: whatever was frozen there shows."""
    num_seqs = side.plan.rows[row].num_seqs
    canary = side.row_batch(row, 0, torch.arange(1, num_seqs + 1, device=side.device) % side.vocab_size)
    side.step.begin(canary)
    eager = side.forward(canary, side.kv).clone()
    replayed = graphs(canary)
    assert replayed is not None
    limit = CANARY_LIMIT[side.kv.dtype] * float(eager.abs().max())
    if not torch.allclose(eager.float(), replayed.float(), rtol=0, atol=limit):
        worst = float((eager.float() - replayed.float()).abs().max())
        raise failed(
            FailureKind.INSTALL,
            f"a captured graph gives other logits than the step that it was captured from ({worst:.3g})",
        )


def _capture_cuda(step: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    return graph.replay, logits
