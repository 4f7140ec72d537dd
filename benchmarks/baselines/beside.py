"""hotpass's part beside an external engine: after each repeat of the engine it measures the same point, so that ratios are paired.

    engine: repeat 1 ──► part: repeat 1 ──► engine: repeat 2 ──► …          one ratio a repeat, seconds apart, on the same processor

It is timed as the engines are (`sweep.tokens_per_second`). Parts are `cpp-model` as the file stores the weights, once exact and once with
what its class allows narrower; which of them a comparison may use, by accuracy, is for the reader of the numbers to say.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch

from benchmarks.baselines.sweep import POINTS, Row, tokens_per_second, warm_up
from benchmarks.cpp_side import CppSide
from hotpass.records.deployment import ModelRef

STORAGES = {"full": ("gguf", "gguf-a8"), "bf16": ("bf16", "bf16-a16")}
"""Model of a variant → `weights_as` of the parts that run beside it."""


class Beside:
    """The parts of one model, and what they were measured at."""

    def __init__(self, sides: Mapping[str, CppSide]) -> None:
        self._sides = sides
        self._points = {point.name: point for point in POINTS}
        self._speeds: dict[str, dict[str, list[float]]] = {}

    def turn(self, point: str) -> None:
        """One repeat of a point by each part."""
        found = self._speeds.setdefault(point, {name: [] for name in self._sides})
        with torch.inference_mode():
            for name, side in self._sides.items():
                if not found[name]:
                    warm_up(self._points[point], side.generate)
                found[name].append(tokens_per_second(self._points[point], side.generate, 4 + len(found[name])))

    def ratios(self, row: Row) -> dict[str, dict[str, float]]:
        """`weights_as` → hotpass's tokens/s over the engine's: median, lowest and highest of the repeats, their number."""
        return {
            name: over(speeds, row.tokens_per_s) for name, speeds in self._speeds.get(row.point, {}).items() if speeds
        }


def over(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Ratios by repeat; of a run that was cut, of those that both have."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "pairs": len(ratios)}


@contextlib.contextmanager
def beside(model: ModelRef, kind: str, threads: int) -> Iterator[Beside]:
    """`kind`: a key of STORAGES."""
    slots = max(point.num_seqs for point in POINTS)
    positions = max(point.context + point.steps + 1 for point in POINTS)
    with contextlib.ExitStack() as stack:
        sides = {}
        for weights_as in STORAGES[kind]:
            params = {"weights_as": weights_as}
            sides[weights_as] = CppSide(model, params, slots=slots, positions=positions, threads=threads)
            stack.callback(sides[weights_as].close)
        yield Beside(sides)
