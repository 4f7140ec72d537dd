"""Campaign time: what the budget is counted in. Real seconds, or those that a simulated engine says have passed."""

from __future__ import annotations

import time
from typing import Protocol

from hotpass.records.measurement import MeasureResult


class Clock(Protocol):
    """Seconds of a campaign, over all its sessions."""

    def seconds(self) -> float: ...

    def observe(self, result: MeasureResult) -> None:
        """An engine has answered."""
        ...


class WallClock:
    """Goes on by itself, from where an earlier session of the campaign stopped."""

    def __init__(self, already_seconds: float = 0.0) -> None:
        self._zero = time.monotonic() - already_seconds

    def seconds(self) -> float:
        return time.monotonic() - self._zero

    def observe(self, result: MeasureResult) -> None:
        """Nothing to learn: the time has passed."""


class SimulatedClock:
    """Advances by what the fake engines say their measurements took, shared between those that work at once."""

    def __init__(self, already_seconds: float = 0.0, num_engines: int = 1) -> None:
        self._seconds = already_seconds
        self._num_engines = num_engines

    def seconds(self) -> float:
        return self._seconds

    def observe(self, result: MeasureResult) -> None:
        self._seconds += sum(result.phases_ms.values()) / 1e3 / self._num_engines
