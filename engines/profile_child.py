"""A row under observation, in a child that is discarded afterwards: whatever has slots and steps (`Observed`).

    some steps ──plain──► step time ──calls around slots──► slot times ──torch.profiler──► operators, gaps, Chrome trace

Calls around slots and ranges are set only here, after the last measurement that this child could serve. Compiled code is not seen into:
slots below a compiled module are left out. What work a slot's place asks for is its engine's to tell (`engines.decoder.observed`,
`engines.vllm.observed`).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

MOST_STEPS = 8
WARM_STEPS = 2
TOP_OPERATORS = 25
GRAIN_US = 1.0
"""Shorter pauses between operators are not counted as gaps."""
STEP_RANGE, PART_RANGE, SLOT_RANGE = "hotpass step", "part ", "slot "


@dataclass(kw_only=True, slots=True)
class Work:
    """Of one slot in one step as loaded."""

    calls: int = 0
    bytes_moved: int = 0
    flops: int = 0
    known: bool = True
    """False where something below the slot does more than these say."""


@dataclass(kw_only=True, slots=True)
class Seen:
    """What one pass saw of the slots."""

    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    below: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of the slots directly below."""


Note = Callable[[str], None]
"""Takes the name of a slot."""


class Observed(Protocol):
    """One row of a side."""

    parts: frozenset[str]
    """Slots that a part of the candidate serves."""
    on_gpu: bool

    @property
    def watched(self) -> Sequence[str]:
        """Slots that can be told apart."""
        ...

    def steps(self, count: int) -> Iterator[Callable[[], object]]:
        """So many steps of the row in turn. Calling one computes it; what it takes is made before it is given."""
        ...

    def around(self, enter: Note, leave: Note) -> AbstractContextManager[None]:
        """Meanwhile every call of a watched slot is told, its start and its end."""
        ...

    def wait(self) -> None:
        """Until the device has done what it was given."""
        ...


def profile_steps(
    side: Observed, slots: Sequence[str], work: Mapping[str, Work], count: int
) -> tuple[dict[str, Any], bytes]:
    """Plain figures of a row over at most `count` steps, and its Chrome trace. `slots` are the table's names.

    What a candidate's code raises passes through.
    """
    steps = min(MOST_STEPS, count)
    for step in side.steps(min(WARM_STEPS, steps)):
        step()
    step_seconds = [_timed(side, step) for step in side.steps(steps)]
    seen = _slot_times(side, steps)
    operators, trace = _operators(side, steps)
    figures = {
        "steps": steps,
        "step_ms": statistics.median(step_seconds) * 1e3,
        **operators,
        "slots": [
            {
                "slot": name,
                "calls": seen.calls[name] / steps,
                "ms": seen.seconds[name] / steps * 1e3,
                "self_ms": max(0.0, seen.seconds[name] - seen.below[name]) / steps * 1e3,
                "by_part": name in side.parts,
                "bytes_moved": work[name].bytes_moved,
                "flops": work[name].flops,
                "known": work[name].known,
            }
            for name in slots
            if seen.calls[name]
        ],
        "unseen": len(slots) - len(side.watched),
    }
    return figures, trace


def bytes_of(value: Any) -> int:
    """Of every tensor in arguments or an answer."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(bytes_of(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return sum(bytes_of(item) for item in value)
    return 0


def _timed(side: Observed, step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    side.wait()
    return time.perf_counter() - start


def _slot_times(side: Observed, steps: int) -> Seen:
    """Inclusive time of every slot over the steps. On a GPU each slot is waited for, which overlapping work pays for."""
    seen, stack = Seen(), list[tuple[str, float]]()

    def enter(slot: str) -> None:
        side.wait()
        stack.append((slot, time.perf_counter()))

    def leave(slot: str) -> None:
        side.wait()
        name, start = stack.pop()
        seconds = time.perf_counter() - start
        seen.calls[name] += 1
        seen.seconds[name] += seconds
        if stack:
            seen.below[stack[-1][0]] += seconds

    with side.around(enter, leave):
        for step in side.steps(steps):
            step()
    return seen


def _operators(side: Observed, steps: int) -> tuple[dict[str, Any], bytes]:
    """Operators and gaps under torch's profiler, and the trace, with a range for every slot."""
    from torch.autograd.profiler import record_function
    from torch.profiler import ProfilerActivity, profile

    ranges: list[Any] = []

    def enter(slot: str) -> None:
        ranges.append(record_function(f"{PART_RANGE if slot in side.parts else SLOT_RANGE}{slot}"))
        ranges[-1].__enter__()

    def leave(slot: str) -> None:
        ranges.pop().__exit__(None, None, None)

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if side.on_gpu else [])]
    with side.around(enter, leave), profile(activities=activities) as profiler:
        for step in side.steps(steps):
            with record_function(STEP_RANGE):
                step()
                side.wait()
    path = os.path.join(tempfile.gettempdir(), "trace.json")
    profiler.export_chrome_trace(path)
    with open(path, "rb") as file:
        trace = file.read()
    return _figures(profiler, steps, side.on_gpu), trace


def _figures(profiler: Any, steps: int, on_gpu: bool) -> dict[str, Any]:
    events = list(profiler.events())
    ranges = [event for event in events if event.name == STEP_RANGE and not _on_device(event)]
    profiled_us = sum(event.time_range.end - event.time_range.start for event in ranges)
    busy = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if (_on_device(event) if on_gpu else _is_operator(event.name) or event.name.startswith(PART_RANGE))
    ]
    gaps = [
        gap for step in ranges for gap in pauses(busy, step.time_range.start, step.time_range.end) if gap > GRAIN_US
    ]
    names = profiler.key_averages()
    rows = [
        (item.key, item.count, item.self_device_time_total if on_gpu else item.self_cpu_time_total)
        for item in names
        if _is_operator(item.key) or (on_gpu and item.self_device_time_total > 0 and "hotpass" not in item.key)
    ]
    rows.sort(key=lambda item: -item[2])
    return {
        "profiled_ms": profiled_us / steps / 1e3,
        "gaps_ms": sum(gaps) / steps / 1e3,
        "num_gaps": len(gaps) / steps,
        "longest_gap_ms": max(gaps, default=0.0) / 1e3,
        "operators": [
            {
                "name": name,
                "calls": calls / steps,
                "self_ms": time_us / steps / 1e3,
                "share": time_us / profiled_us if profiled_us else 0.0,
            }
            for name, calls, time_us in rows[:TOP_OPERATORS]
        ],
    }


def pauses(busy: Sequence[tuple[float, float]], start: float, end: float) -> Iterator[float]:
    """Lengths of what no interval covers between start and end; intervals in any order, overlapping or not."""
    reached = start
    for low, high in sorted(busy):
        if high <= start or low >= end:
            continue
        if low > reached:
            yield low - reached
        reached = max(reached, high)
    if reached < end:
        yield end - reached


def _is_operator(name: str) -> bool:
    return "::" in name and not name.startswith((SLOT_RANGE, PART_RANGE))


def _on_device(event: Any) -> bool:
    return str(event.device_type).rsplit(".", 1)[-1] == "CUDA"
