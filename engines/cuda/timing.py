"""Inside a window on a GPU: events beside the clock, and the L2 cache swept between windows. Both do nothing on a CPU.

    sweep ─ (previous window's end) ─► event ── steps ── event ─► synchronize ─► device seconds beside the clock's

Not tried on a GPU: tested against a stand-in for torch.cuda.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SWEEP_FACTOR = 2
"""Bytes written by a sweep, over those of the L2 cache: its replacement is not strictly the oldest first."""

_Event: Any = torch.cuda.Event
"""As it was when the child started: what a candidate puts in its place is not asked."""


def device_marks(device: torch.device) -> Callable[[], float]:
    """Marks the current stream's time now; the answer marks it again, waits for the device, and gives the seconds between, 0 on a CPU.

    The first mark is taken as the device comes to it, and it is idle then; so what the events measure is what a clock does, from the
    same moment. Work on another stream that the current one never waits for is not between them: then they say less than the clock.
    """
    if device.type != "cuda":
        return lambda: 0.0
    torch.cuda.synchronize(device)
    begin, end = _Event(enable_timing=True), _Event(enable_timing=True)
    begin.record()

    def finish() -> float:
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) / 1e3

    return finish


class Sweep:
    """Writes over more than the L2 cache holds, so that a window does not begin with what the one before left there.

    Sides share weights: the last ones that one side read would be a gift to the first layer of the other. The kernel is only started;
    it ends long before the judge has read the answers of the window that it follows.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(SWEEP_FACTOR * l2_bytes(device), dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        if self._buffer.numel():
            self._buffer.zero_()


def l2_bytes(device: torch.device) -> int:
    """Of the device's L2 cache, as the driver tells it; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
