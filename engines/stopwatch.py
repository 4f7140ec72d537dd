"""Time by phase, for start-ups and reloads. What a candidate takes is the judge's to time; this is for what an engine does itself."""

from __future__ import annotations

import time


class Stopwatch:
    """Milliseconds by phase, from lap to lap."""

    def __init__(self) -> None:
        self.phases_ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Everything since the last lap was this phase; one that comes again adds up."""
        now = time.perf_counter()
        self.phases_ms[phase] = self.phases_ms.get(phase, 0.0) + (now - self._last) * 1e3
        self._last = now
