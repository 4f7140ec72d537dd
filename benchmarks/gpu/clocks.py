"""Times and what they depend on: events against the wall clock, work that nothing waits for, the L2 cache, clocks by NVML."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.outcome import Check, Figures, Place, expect
from engines.cuda.conditions import Conditions, GpuMonitor
from engines.cuda.timing import Sweep, device_marks, l2_bytes

CLOCKS_AGREE = 0.05
"""Largest difference of events and wall clock over some milliseconds of work, as a share."""
WARMER = 1.05
"""A read of what the L2 cache holds is at least so many times as fast as one after a sweep."""
REPEATS = 20


def events_and_wall_clock(place: Place) -> Figures:
    place.needs_gpu("no events")
    a = torch.randn(4096, 4096, device=place.device, dtype=torch.bfloat16)
    ratios = []
    for _ in range(REPEATS):
        finish = device_marks(a.device)
        start = time.perf_counter()
        for _ in range(30):
            a @ a
        device = finish()
        ratios.append(device / (time.perf_counter() - start))
    ratio = statistics.median(ratios)
    expect(abs(ratio - 1) <= CLOCKS_AGREE, f"events say {ratio:.3f} of the wall clock")
    return {"events_over_wall": ratio, "least": min(ratios), "most": max(ratios)}


def work_on_another_stream(place: Place) -> Figures:
    """What nothing waits for is not between the events, but within the clock's time: the judge sees both."""
    place.needs_gpu("no streams")
    a = torch.randn(8192, 8192, device=place.device, dtype=torch.bfloat16)
    other = torch.cuda.Stream(a.device)  # type: ignore[no-untyped-call]
    finish = device_marks(a.device)
    start = time.perf_counter()
    with torch.cuda.stream(other):
        for _ in range(20):
            a @ a
    device = finish()
    wall = time.perf_counter() - start
    expect(device < 0.5 * wall, f"events say {device / wall:.2f} of the clock although all work was elsewhere")
    return {"events_over_wall": device / wall}


def l2_sweep(place: Place) -> Figures:
    """Reading again what was just read is faster than after a sweep: the sweep does empty the cache."""
    place.needs_gpu("no L2 cache")
    device = torch.device(place.device)
    size = l2_bytes(device)
    expect(size > 0, "the driver does not say how large the L2 cache is")
    data = torch.ones(size // 4 // 4, device=device)  # a quarter of it
    sweep = Sweep(device)
    warm = statistics.median(_timed(data, lambda: None) for _ in range(REPEATS))
    cold = statistics.median(_timed(data, sweep) for _ in range(REPEATS))
    expect(cold > WARMER * warm, f"{cold * 1e6:.1f} us after a sweep, {warm * 1e6:.1f} us without: nothing was swept")
    return {"l2_mib": size >> 20, "warm_us": warm * 1e6, "swept_us": cold * 1e6}


def _timed(data: torch.Tensor, before: Callable[[], None]) -> float:
    out = torch.empty((), device=data.device)
    torch.sum(data, dim=0, out=out)
    before()
    finish = device_marks(data.device)
    torch.sum(data, dim=0, out=out)
    return finish()


def conditions(place: Place) -> Figures:
    """Clocks rise under load, and NVML says what holds them down."""
    place.needs_gpu("no NVML")
    monitor = GpuMonitor()
    watched = Conditions(sample=monitor.sample)
    watched.note()
    a = torch.randn(8192, 8192, device=place.device, dtype=torch.bfloat16)
    for _ in range(5):
        for _ in range(20):
            a @ a
        watched.note()  # while it runs: nothing has been waited for
    torch.cuda.synchronize()
    monitor.close()
    record = watched.record()
    assert record is not None
    expect(record.sm_clock_mhz[1] > 0, "NVML tells no clock")
    slowed = sorted({reason for state in watched.states for reason in state.slowed})
    expect(not slowed, f"this GPU slows itself down ({', '.join(slowed)}): times taken now say little")
    return {
        "sm_clock_mhz": list(record.sm_clock_mhz), "memory_clock_mhz": list(record.memory_clock_mhz),
        "temperature_c": record.temperature_max_c, "power_watts": record.power_max_watts, "limited_by": list(record.limited_by),
    }  # fmt: skip


CHECKS: tuple[tuple[str, Check], ...] = (
    ("clocks: events and wall clock", events_and_wall_clock),
    ("clocks: work on another stream", work_on_another_stream),
    ("clocks: L2 sweep", l2_sweep),
    ("clocks: conditions", conditions),
)
