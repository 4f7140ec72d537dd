"""What every engine's runner shares: the shape points, and measuring them over tunings. Standard library only, since it is
imported in environments that have nothing of this project.

    each tuning ──set up──► each point once (the sweep) ──► the point's best tuning, `repeats` times (the result)
                                                             after each repeat the caller has a turn with hotpass's part

A runner times the whole call of its engine by the wall clock. Decoding speed is the difference between a long and a
one-token generation after the same prompt, so that prefill, sampling set-up and tokenisation cancel out.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 49_000
"""Token ids are drawn below this: ordinary tokens of the model at hand."""


@dataclass(frozen=True)
class Point:
    """A shape that all engines are measured at."""

    name: str
    phase: str
    num_seqs: int
    context: int
    """Tokens in the cache before the measured steps; for prefill, tokens computed."""
    steps: int
    """Decode steps that are timed; 1 for prefill."""

    @property
    def tokens(self) -> int:
        """Tokens that a measured call makes (decode) or computes (prefill)."""
        return self.num_seqs * (self.steps if self.phase == "decode" else self.context)


POINTS = (
    Point("decode-1", "decode", 1, 256, 64),
    Point("decode-8", "decode", 8, 256, 64),
    Point("prefill-512", "prefill", 1, 512, 1),
)

TURN, ROW = "hotpass-turn ", "hotpass-row "
"""What lines of a runner's stdout begin with: a repeat is done, go on by a line on stdin; a row is done."""

Tuning = dict[str, Any]
Generate = Callable[[list[list[int]], int], None]
"""(prompts as token ids, new tokens each) → done when all are generated."""


@dataclass
class Row:
    """One point of one engine, measured."""

    point: str
    tuning: Tuning
    tokens_per_s: list[float]
    """One a repeat."""
    swept: list[dict[str, Any]] = field(default_factory=list)
    """Every tuning tried, with the one number that it was judged by, or why it failed."""

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


def prompts(point: Point, seed: int) -> list[list[int]]:
    """Fresh token ids; no two calls share a prefix, so that no prefix cache can answer."""
    draw = random.Random(f"{point.name}/{seed}")
    return [[draw.randrange(10, VOCAB) for _ in range(point.context)] for _ in range(point.num_seqs)]


def tokens_per_second(point: Point, generate: Generate, seed: int) -> float:
    """One measurement of a point."""
    if point.phase == "prefill":
        return point.tokens / _timed(generate, prompts(point, seed), 1)
    first = _timed(generate, prompts(point, 2 * seed), 1)
    whole = _timed(generate, prompts(point, 2 * seed + 1), 1 + point.steps)
    if whole <= first:
        raise RuntimeError(f"{1 + point.steps} tokens took no longer than one")
    return point.tokens / (whole - first)


def warm_up(point: Point, generate: Generate) -> None:
    """Once through both calls of a measurement, untimed: allocations, first touches, compilation for the shape."""
    generate(prompts(point, 0), 1)
    if point.phase == "decode":
        generate(prompts(point, 1), 1 + point.steps)


def _timed(generate: Generate, tokens: list[list[int]], new_tokens: int) -> float:
    start = time.perf_counter()
    generate(tokens, new_tokens)
    return time.perf_counter() - start


def measure(
    tunings: Sequence[Tuning],
    set_up: Callable[[Tuning], Generate],
    points: Sequence[Point],
    repeats: int,
    seconds: float,
    turn: Callable[[str], object] | None = None,
) -> Iterator[Row]:
    """The points at their best tunings, as they come. `seconds`: the sweep stops taking up new tunings after this long. `turn`: called
    with the point's name after each repeat.

    A tuning that fails is recorded with its reason; a point for which all fail has no row.
    """
    swept: dict[str, list[dict[str, Any]]] = {point.name: [] for point in points}
    start = time.perf_counter()
    for tuning in tunings:
        if time.perf_counter() - start > seconds:
            say(f"sweep stopped after {seconds:.0f} s, before {tuning}")
            break
        try:
            generate = set_up(tuning)
            for point in points:
                warm_up(point, generate)
                swept[point.name].append({"tuning": tuning, "tokens_per_s": tokens_per_second(point, generate, 2)})
        except Exception as error:  # the engine's own errors, whatever they are
            say(f"{tuning}: {type(error).__name__}: {error}")
            for point in points:
                swept[point.name].append({"tuning": tuning, "failed": f"{type(error).__name__}: {error}"[:300]})
    for point in points:
        worked = [item for item in swept[point.name] if "tokens_per_s" in item]
        if not worked:
            continue
        best = max(worked, key=lambda item: item["tokens_per_s"])["tuning"]
        generate = set_up(best)
        warm_up(point, generate)
        values = []
        for repeat in range(repeats):
            values.append(tokens_per_second(point, generate, 4 + repeat))
            if turn is not None:
                turn(point.name)
        yield Row(point.name, best, values, swept[point.name])


def run_orders(orders: dict[str, Any], tunings: Sequence[Tuning], set_up: Callable[[Tuning], Generate]) -> None:
    """What a runner does: its points measured, each row said as soon as it is there, so that a run that is cut has what it has."""
    points = [point for point in POINTS if point.name in orders["points"]]
    for row in measure(
        tunings, set_up, points, orders["repeats"], orders["seconds"], hand_over if orders["turns"] else None
    ):
        print(ROW + json.dumps(asdict(row)), flush=True)


def hand_over(point: str) -> None:
    """The caller's turn, until it says that it is done."""
    print(TURN + point, flush=True)
    sys.stdin.readline()


def request() -> dict[str, Any]:
    """A runner's orders: the JSON file that its command line names."""
    orders: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return orders


def reply(**facts: Any) -> None:
    """A runner's last line on stdout, after its rows."""
    print(json.dumps(facts), flush=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
