"""CUDA graphs in the decoder program: replay against eager, frozen facts, a stale graph, a moved address, and memory given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.models import SHAPES, Loaded, planted
from benchmarks.gpu.outcome import Check, Figures, Place, Wrong, expect
from engines.cuda.level import allocated_bytes
from engines.decoder.graphs import addresses
from engines.judge.clean import DEVICE_MARGIN_BYTES
from engines.program import CandidateFailed
from hotpass.records.candidate import Candidate

GRAPHED = Candidate(settings={"cuda_graphs": True})
DECODE = (0, 1)
STEPS = 8
LIMIT = 1e-4
"""Of the largest logit, in float32: other kernels may run in a graph, other inputs may not."""


def replay_is_eager(place: Place) -> Figures:
    """Every decode row answers from its graph as without one, and faster; prompts run as before."""
    with _loaded(place) as loaded:
        eager = [loaded.window("incumbent", row) for row in range(3)]
        loaded.install(GRAPHED)
        worst, gains = 0.0, []
        for row in range(3):
            logits, reply = loaded.window("candidate", row)
            worst = max(worst, _difference(logits, eager[row][0]))
            expect(reply.compile_events == 0, "captured inside a window although nothing moved")
            gains.append(eager[row][1].seconds / reply.seconds)
        expect(worst <= LIMIT, f"replay is off by {worst:.2e} of the largest logit")
        return {"difference": worst, "decode_speedup": gains[:2], "prompt_speedup": gains[2]}


def frozen_facts(place: Place) -> Figures:
    """A part whose answer depends on a length that the host knows is refused: its graph would replay the captured one."""
    with _loaded(place) as loaded:
        part = planted("model.norm", "return self.before(*args, **kwargs) * (1 + 0.01 * self.ctx.step.batch.context)")
        try:
            loaded.install(replace(part, settings={"cuda_graphs": True}))
        except CandidateFailed as failure:
            expect("other logits" in str(failure), f"refused, but for another reason: {failure}")
            return {}
        raise Wrong("a graph that froze the context's length was taken")


def stale_graph(place: Place) -> Figures:
    """A weight that is exchanged after the capture: a graph goes on with the old one. Without the comparison of addresses that would be
    the answer; with it everything is captured again, and answers as eager does."""
    with _loaded(place) as loaded:
        loaded.install(GRAPHED)
        side = loaded.program._loaded("candidate", 0)
        before, _ = loaded.window("candidate", 0)
        weight: Any = side.net.modules["model.norm"].weight
        held, weight.data = weight.data, 2 * weight.data
        assert side.graphs is not None
        side.graphs._addresses = addresses(side)  # a comparison that sees nothing
        stale, _ = loaded.window("candidate", 0)
        side.graphs._addresses = ()
        renewed, reply = loaded.window("candidate", 0)
        graphs, side.graphs = side.graphs, None
        eager, _ = loaded.window("candidate", 0)
        side.graphs = graphs
        weight.data = held
        expect(_difference(stale, before) <= LIMIT, "the planted graph is not stale: the check shows nothing")
        expect(reply.compile_events == len(DECODE), f"{reply.compile_events} captures, not {len(DECODE)}")
        expect(_difference(renewed, eager) <= LIMIT, "captured again, and still not as eager")
        return {"stale_is_off_by": _difference(stale, eager)}


def moved_address(place: Place) -> Figures:
    """The same values at another address: nothing in the answer shows it, the addresses do."""
    with _loaded(place) as loaded:
        loaded.install(GRAPHED)
        side = loaded.program._loaded("candidate", 0)
        weight: Any = side.net.modules["model.norm"].weight
        held, weight.data = weight.data, weight.data.clone()
        first, second = (loaded.window("candidate", 1)[1].compile_events for _ in range(2))
        weight.data = held
        expect(first == len(DECODE), f"{first} captures after an address moved, not {len(DECODE)}")
        expect(second == 0, "captured again although nothing moved since")
        return {}


def graphs_give_memory_back(place: Place) -> Figures:
    """Captured graphs and their pool are gone with the candidate; what a candidate keeps is not, and shows."""
    with _loaded(place) as loaded:
        device = torch.device(place.device)
        loaded.install(GRAPHED)
        loaded.program.uninstall("candidate")
        before = allocated_bytes(device)
        for _ in range(3):
            loaded.install(GRAPHED)
            loaded.window("candidate", 0)
            loaded.program.uninstall("candidate")
        left = allocated_bytes(device) - before
        expect(left <= DEVICE_MARGIN_BYTES, f"{left >> 20} MiB are left of three candidates with graphs")
        leak = planted(
            "model.norm", "return self.before(*args, **kwargs)",
            prepare=f"torch.kept = torch.zeros({4 * DEVICE_MARGIN_BYTES}, dtype=torch.uint8, device=ctx.device)",
        )  # fmt: skip
        loaded.install(leak)
        loaded.program.uninstall("candidate")
        kept = allocated_bytes(device) - before
        del torch.kept  # type: ignore[attr-defined]
        expect(kept > DEVICE_MARGIN_BYTES, "a candidate's leak does not show in the level")
        return {"left_bytes": left, "leak_bytes": kept}


CHECKS: tuple[tuple[str, Check], ...] = (
    ("graphs: replay is eager", replay_is_eager),
    ("graphs: frozen facts", frozen_facts),
    ("graphs: stale graph", stale_graph),
    ("graphs: moved address", moved_address),
    ("graphs: memory given back", graphs_give_memory_back),
)


@contextmanager
def _loaded(place: Place) -> Iterator[Loaded]:
    place.needs_gpu("no graphs")
    folder = place.folder / "graphs"
    folder.mkdir(exist_ok=True)
    yield Loaded(folder, SHAPES["tiny"], "float32", place.device, STEPS)


def _difference(some: torch.Tensor, other: torch.Tensor) -> float:
    return float((some - other).abs().max() / other.abs().max())
