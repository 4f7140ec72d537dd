"""Which shape rows a round spends its time on, by how long a window of each takes and what depends on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hotpass.records.shapes import Phase

PROMPT_PHASES = (Phase.PREFILL, Phase.MIXED)
"""Of rows whose steps are long."""

LONG_WINDOW = 4.0
"""A window that takes so many times the shortest one is long."""


def long_rows(windows: Sequence[float]) -> frozenset[int]:
    """Rows with long windows. `windows`: seconds of one of each row."""
    return frozenset(row for row, window in enumerate(windows) if window >= LONG_WINDOW * min(windows))


def late_rows(phases: Sequence[Phase], windows: Sequence[float]) -> frozenset[int]:
    """Rows that a search measures after the others, if at all: long windows, and prompts, on which a slow candidate is slowest."""
    late = long_rows(windows) | {row for row, phase in enumerate(phases) if phase in PROMPT_PHASES}
    return late if len(late) < len(windows) else frozenset()


def brief_rows(shares: Sequence[float], step_seconds: Sequence[float], windows: Sequence[float]) -> frozenset[int]:
    """Rows with long windows that deserve half as many as the others or less.

    For a sum of row times whose relative noise is alike, the variance that a given time buys is least when a row has windows in
    proportion to its share of the sum ÷ the root of a window's duration (Neyman's allocation with costs).
    """
    worth = [
        share * seconds / math.sqrt(window)
        for share, seconds, window in zip(shares, step_seconds, windows, strict=True)
    ]
    return frozenset(row for row in long_rows(windows) if worth[row] <= max(worth) / 2)
