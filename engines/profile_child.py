"""A row of a side under observation, in a child that is discarded afterwards.

    as loaded, one step ──hooks, FLOP counter──► least work of each slot
    the side, some steps ──plain──► step time ──hooks──► slot times ──torch.profiler──► operators, gaps, Chrome trace

Hooks and ranges are set only here, after the last measurement that this child could serve. Compiled code is not seen into: hooks inside
would break it, so slots below a compiled module are left out.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from engines.decoder.side import DecoderSide
from engines.decoder.slots import WHOLE
from engines.decoder.windows import synchronize
from engines.flops import flop_counter

MOST_STEPS = 8
TOP_OPERATORS = 25
GRAIN_US = 1.0
"""Shorter pauses between operators are not counted as gaps."""
STEP_RANGE, PART_RANGE, SLOT_RANGE = "hotpass step", "part ", "slot "
_LOOKED_UP = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@dataclass(kw_only=True, slots=True)
class Work:
    """Of one slot in one step as loaded."""

    calls: int = 0
    bytes_moved: int = 0
    flops: int = 0


@dataclass(kw_only=True, slots=True)
class Seen:
    """What one pass with hooks saw of the slots."""

    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    below: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of the slots directly below."""


Slots = Mapping[str, torch.nn.Module]
"""Slot → its module on a side; `model` stands for the side's forward."""


def profile_row(
    side: DecoderSide, loaded: DecoderSide, slots: Sequence[str], row: int, tokens: torch.Tensor
) -> tuple[dict[str, Any], bytes]:
    """Plain figures of a row, and its Chrome trace. `tokens` [steps, …] as in a window; `slots` are the table's names.

    What a candidate's code raises passes through.
    """
    steps = min(MOST_STEPS, len(tokens))
    with torch.inference_mode():
        work = _work(loaded, {name: _module(loaded, name) for name in slots}, row, tokens[0])
        side.activate()
        watched = {name: _module(side, name) for name in slots if not _is_inside_compiled(side, name)}
        for step in range(min(2, steps)):
            side.run(side.row_batch(row, step, tokens[step]))
        step_seconds = [_timed(side, row, step, tokens) for step in range(steps)]
        seen = _slot_times(side, watched, row, tokens[:steps])
        operators, trace = _operators(side, watched, row, tokens[:steps])
    parts = frozenset(side.installed.counts) if side.installed is not None else frozenset()
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
                "by_part": name in parts,
                "bytes_moved": work[name].bytes_moved,
                "flops": work[name].flops,
            }
            for name in slots
            if seen.calls[name]
        ],
        "unseen": len(slots) - len(watched),
    }
    return figures, trace


def _timed(side: DecoderSide, row: int, step: int, tokens: torch.Tensor) -> float:
    batch = side.row_batch(row, step, tokens[step])
    start = time.perf_counter()
    side.run(batch)
    synchronize(side.device)
    return time.perf_counter() - start


def _module(side: DecoderSide, slot: str) -> torch.nn.Module:
    return side.net.model if slot == WHOLE else side.net.modules[slot]


def _is_inside_compiled(side: DecoderSide, slot: str) -> bool:
    if side.settings["compile_mode"] == "none" or slot == WHOLE:
        return False
    return any(path == "" or slot.startswith(f"{path}.") for path in side.net.layer_paths)


def _work(loaded: DecoderSide, modules: Slots, row: int, tokens: torch.Tensor) -> dict[str, Work]:
    """Bytes and FLOPs of each slot in one step as loaded."""
    work: dict[str, Work] = defaultdict(Work)

    def note(slot: str, module: torch.nn.Module, given: Any, answer: Any) -> None:
        work[slot].calls += 1
        work[slot].bytes_moved += _bytes_of(given) + _bytes_of(answer)

    loaded.activate()
    with ExitStack() as hooks, flop_counter() as counter:
        for slot, module in modules.items():
            hooks.enter_context(_hook(module, lambda *_: None, _noting(note, slot)))
        loaded.run(loaded.row_batch(row, 0, tokens))
    root = type(loaded.net.model).__name__
    counted = {
        str(name).removeprefix(f"{root}."): sum(operators.values())
        for name, operators in counter.get_flop_counts().items()
    }
    for slot, module in modules.items():
        work[slot].flops = int(counted.get(root if slot == WHOLE else slot, 0))
        work[slot].bytes_moved += _weight_bytes(module, work[slot].calls) + _kv_bytes(loaded, slot, row)
    return work


def _noting(note: Callable[..., None], slot: str) -> Callable[..., None]:
    return lambda module, args, kwargs, answer: note(slot, module, (args, kwargs), answer)


def _weight_bytes(module: torch.nn.Module, calls: int) -> int:
    """Every weight below a module once; of lookup tables nothing, since the rows looked up are the outputs."""
    if not calls:
        return 0
    read = {
        parameter.data_ptr(): parameter.numel() * parameter.element_size()
        for child in module.modules()
        if not isinstance(child, _LOOKED_UP)
        for parameter in child.parameters(recurse=False)
    }
    return sum(read.values())


def _kv_bytes(side: DecoderSide, slot: str, row: int) -> int:
    """Of the attention at or below a slot; 0 for a module without a cache."""
    kv, plan = side.kv, side.plan
    if not kv.num_layers:
        return 0
    keys = kv.keys(0)
    per_token = 2 * keys.shape[1] * keys.shape[3] * keys.element_size()
    tokens = sum(plan.row_contexts(row)) + sum(plan.row_query_lens(row))
    return _attention_layers(side, slot) * per_token * tokens


def _attention_layers(side: DecoderSide, slot: str) -> int:
    below = "" if slot == WHOLE else f"{slot}."
    layers = {
        module.layer_idx
        for name, module in side.net.modules.items()
        if "hotpass_step" in module.__dict__ and (name == slot or name.startswith(below))
    }
    return len(layers)


def _slot_times(side: DecoderSide, modules: Slots, row: int, tokens: torch.Tensor) -> Seen:
    """Inclusive time of every slot over the steps. On a GPU each slot is waited for, which overlapping work pays for."""
    seen, stack = Seen(), list[tuple[str, float]]()

    def enter(slot: str) -> None:
        synchronize(side.device)
        stack.append((slot, time.perf_counter()))

    def leave(slot: str) -> None:
        synchronize(side.device)
        name, start = stack.pop()
        seconds = time.perf_counter() - start
        seen.calls[name] += 1
        seen.seconds[name] += seconds
        if stack:
            seen.below[stack[-1][0]] += seconds

    with _around(side, modules, enter, leave):
        for step in range(len(tokens)):
            side.run(side.row_batch(row, step, tokens[step]))
    return seen


def _operators(side: DecoderSide, modules: Slots, row: int, tokens: torch.Tensor) -> tuple[dict[str, Any], bytes]:
    """Operators and gaps under torch's profiler, and the trace, with a range for every slot."""
    from torch.autograd.profiler import record_function
    from torch.profiler import ProfilerActivity, profile

    parts = frozenset(side.installed.counts) if side.installed is not None else frozenset()
    ranges: list[Any] = []

    def enter(slot: str) -> None:
        ranges.append(record_function(f"{PART_RANGE if slot in parts else SLOT_RANGE}{slot}"))
        ranges[-1].__enter__()

    def leave(slot: str) -> None:
        ranges.pop().__exit__(None, None, None)

    on_gpu = side.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with _around(side, modules, enter, leave), profile(activities=activities) as profiler:
        for step in range(len(tokens)):
            with record_function(STEP_RANGE):
                side.run(side.row_batch(row, step, tokens[step]))
                synchronize(side.device)
    path = os.path.join(tempfile.gettempdir(), "trace.json")
    profiler.export_chrome_trace(path)
    with open(path, "rb") as file:
        trace = file.read()
    return _figures(profiler, len(tokens), on_gpu), trace


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


@contextmanager
def _around(
    side: DecoderSide, modules: Slots, enter: Callable[[str], None], leave: Callable[[str], None]
) -> Iterator[None]:
    """Calls around every slot: hooks on modules; the side's own forward for `model`."""
    forward = side.forward

    def whole(*args: Any, **kwargs: Any) -> Any:
        enter(WHOLE)
        try:
            return forward(*args, **kwargs)
        finally:
            leave(WHOLE)

    with ExitStack() as hooks:
        for slot, module in modules.items():
            if slot != WHOLE:
                hooks.enter_context(_hook(module, _entering(enter, slot), _leaving(leave, slot)))
        side.forward = whole
        try:
            yield
        finally:
            side.forward = forward


def _entering(enter: Callable[[str], None], slot: str) -> Callable[..., None]:
    return lambda *_: enter(slot)


def _leaving(leave: Callable[[str], None], slot: str) -> Callable[..., None]:
    return lambda *_: leave(slot)


@contextmanager
def _hook(module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    pre = module.register_forward_pre_hook(before)
    post = module.register_forward_hook(after, with_kwargs=True, always_call=True)
    try:
        yield
    finally:
        pre.remove()
        post.remove()


def _bytes_of(value: Any) -> int:
    """Of every tensor in arguments or an answer."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(_bytes_of(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return sum(_bytes_of(item) for item in value)
    return 0
