"""Charts of the report as inline SVG: no script, no image file, no request. Each returns one `<svg>` element as text.

What is not here: choosing what to show (`cluster.report.data`) and the page around it (`cluster.report.page`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
INK, MUTED, GRID = "#1d2430", "#6b7685", "#e4e8ee"
GREEN, BLUE, ORANGE, GREY, RED = "#1f7a4d", "#2f6fb0", "#c0561f", "#b6bec9", "#b3261e"
LINES = (GREEN, BLUE, ORANGE, "#7a4fa3", "#9a7b1c", RED, "#2b8a8a", MUTED)
"""Colours of several lines in one chart."""
RATIOS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One attempt in the progress chart."""

    seconds: float
    value: float
    colour: str
    text: str
    """Shown when the pointer rests on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar with an interval."""

    label: str
    value: float
    low: float
    high: float
    colour: str
    text: str
    """Beside the bar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One candidate by two ratios."""

    x: float
    y: float
    colour: str
    text: str
    """Shown when the pointer rests on it."""


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that span the range: 1, 2 or 5 times a power of ten apart."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= rough)
    start = math.ceil(low / step - 1e-9)
    return [round(step * index, 10) for index in range(start, math.floor(high / step + 1e-9) + 1)]


def time_ticks(end_seconds: float, count: int = 9) -> list[float]:
    """Whole seconds, minutes or hours from 0 to the end."""
    steps = (1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
    step = next((step for step in steps if end_seconds / step <= count), steps[-1])
    return [float(step * index) for index in range(int(end_seconds // step) + 1)]


def progress(
    points: Sequence[Point], steps: Sequence[tuple[float, float]], end_seconds: float, cold: Bar | None
) -> str:
    """Attempts over campaign time; the incumbent as a step line from `steps` (seconds, ratio); the cold result at the right."""
    height, left, right, top, bottom = 320, 52, 110, 16, 40
    values = [1.0, *(point.value for point in points), *(value for _, value in steps), *([cold.high] if cold else [])]
    high = max(values) * 1.06
    low = min(0.9, *values) * 0.95
    span = max(end_seconds, 1e-9)

    def x(seconds: float) -> float:
        return left + (WIDTH - left - right) * seconds / span

    def y(value: float) -> float:
        return top + (height - top - bottom) * (math.log(high) - math.log(value)) / (math.log(high) - math.log(low))

    ratios = [tick for tick in RATIOS if low <= tick <= high]
    parts = [
        _line(left, y(tick), WIDTH - right, y(tick), GRID) + _text(left - 8, y(tick) + 4, f"{tick:g}×", MUTED, "end")
        for tick in ratios
    ]
    for tick in time_ticks(end_seconds):
        parts.append(_text(x(tick), height - bottom + 18, _minutes(tick), MUTED, "middle"))
    parts.append(_line(left, y(1.0), WIDTH - right, y(1.0), MUTED, dash="4 3"))
    parts.append(_text(WIDTH - right + 6, y(1.0) + 4, "as loaded", MUTED))
    for point in points:
        title = f"<title>{escape(point.text)}</title>"
        parts.append(
            f'<circle cx="{x(point.seconds):.1f}" cy="{y(point.value):.1f}" r="3.6" fill="{point.colour}" fill-opacity="0.8">{title}</circle>'
        )
    path, last = [f"M{x(0):.1f},{y(1.0):.1f}"], 1.0
    for seconds, value in steps:
        path.append(f"L{x(seconds):.1f},{y(last):.1f}L{x(seconds):.1f},{y(value):.1f}")
        last = value
    path.append(f"L{x(end_seconds):.1f},{y(last):.1f}")
    parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{GREEN}" stroke-width="2"/>')
    if cold is not None:
        at = WIDTH - right + 4
        parts.append(_line(at, y(cold.low), at, y(cold.high), ORANGE, width=2))
        parts.append(f'<path d="M{at},{y(cold.value) - 6:.1f}l6,6l-6,6l-6,-6z" fill="{ORANGE}"/>')
        parts.append(_text(at + 12, y(cold.value) + 4, cold.text, ORANGE, weight=600))
    parts.append(_text(left + (WIDTH - left - right) / 2, height - 4, "campaign time, min:s", MUTED, "middle"))
    return _svg(height, parts, "Speedup of every timed attempt over campaign time")


def scatter(dots: Sequence[Dot], x_name: str, y_name: str) -> str:
    """Ratios on logarithmic axes; lines where they are 1."""
    height, left, right, top, bottom = 320, 60, 20, 16, 40
    spans = [
        (min(0.9, *values) * 0.95, max(1.1, *values) * 1.05) for values in ([d.x for d in dots], [d.y for d in dots])
    ]

    def place(value: float, axis: int) -> float:
        low, high = spans[axis]
        share = math.log(value / low) / math.log(high / low)
        return left + (WIDTH - left - right) * share if axis == 0 else top + (height - top - bottom) * (1 - share)

    parts = [
        _line(place(tick, 0), top, place(tick, 0), height - bottom, MUTED if tick == 1 else GRID)
        + _text(place(tick, 0), height - bottom + 18, f"{tick:g}×", MUTED, "middle")
        for tick in RATIOS
        if spans[0][0] <= tick <= spans[0][1]
    ]
    parts += [
        _line(left, place(tick, 1), WIDTH - right, place(tick, 1), MUTED if tick == 1 else GRID)
        + _text(left - 8, place(tick, 1) + 4, f"{tick:g}×", MUTED, "end")
        for tick in RATIOS
        if spans[1][0] <= tick <= spans[1][1]
    ]
    parts += [
        f'<circle cx="{place(dot.x, 0):.1f}" cy="{place(dot.y, 1):.1f}" r="4" fill="{dot.colour}" fill-opacity="0.85">'
        f"<title>{escape(dot.text)}</title></circle>"
        for dot in sorted(dots, key=lambda dot: dot.colour == GREEN)
    ]
    parts.append(_text(WIDTH - right, height - 4, x_name, MUTED, "end"))
    parts.append(_text(left + 6, top + 10, y_name, MUTED))
    return _svg(height, parts, f"Candidates by {x_name} and {y_name}")


def lines(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], end_seconds: float) -> str:
    """Step lines of ratios over time, each from 1 at its first step, named at its right end."""
    height, left, right, top, bottom = 240, 52, 150, 16, 40
    high = max([1.05, *(value for _, steps in series for _, value in steps)]) * 1.06
    span = max(end_seconds, 1e-9)

    def x(seconds: float) -> float:
        return left + (WIDTH - left - right) * seconds / span

    def y(value: float) -> float:
        return top + (height - top - bottom) * (1 - math.log(value) / math.log(high))

    parts = [
        _line(left, y(tick), WIDTH - right, y(tick), GRID) + _text(left - 8, y(tick) + 4, f"{tick:g}×", MUTED, "end")
        for tick in RATIOS
        if 1 <= tick <= high
    ]
    for tick in time_ticks(end_seconds):
        parts.append(_text(x(tick), height - bottom + 18, _minutes(tick), MUTED, "middle"))
    taken: list[float] = []
    for colour, (name, steps) in zip(LINES, series, strict=False):
        path, last = [f"M{x(steps[0][0]):.1f},{y(1.0):.1f}"], 1.0
        for seconds, value in steps:
            path.append(f"L{x(seconds):.1f},{y(last):.1f}L{x(seconds):.1f},{y(value):.1f}")
            last = value
        path.append(f"L{x(end_seconds):.1f},{y(last):.1f}")
        parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = y(last) + 4
        while any(abs(at - other) < 13 for other in taken):
            at += 13
        taken.append(at)
        parts.append(_text(WIDTH - right + 6, at, _short(name, 22), colour, weight=600))
    parts.append(_text(left + (WIDTH - left - right) / 2, height - 4, "campaign time, min:s", MUTED, "middle"))
    return _svg(height, parts, "Best of each proposer over campaign time")


def bars(items: Sequence[Bar], *, unit: str = "×", origin: float = 1.0) -> str:
    """Horizontal bars from `origin`, with intervals: gains by part."""
    left, right, row = 250, 190, 26
    height = row * len(items) + 34
    low = min([origin, *(item.low for item in items)])
    high = max([origin, *(item.high for item in items)])
    pad = (high - low) * 0.04 or 0.1
    low, high = low - pad, high + pad

    def x(value: float) -> float:
        return left + (WIDTH - left - right) * (value - low) / (high - low)

    parts = []
    for tick in nice_ticks(low, high, 6):
        parts.append(
            _line(x(tick), 4, x(tick), height - 26, GRID)
            + _text(x(tick), height - 10, f"{tick:g}{unit}", MUTED, "middle")
        )
    for index, item in enumerate(items):
        y = 8 + row * index
        start, end = sorted((x(origin), x(item.value)))
        parts.append(_text(left - 10, y + 13, _short(item.label), INK, "end"))
        parts.append(
            f'<rect x="{start:.1f}" y="{y}" width="{max(end - start, 1):.1f}" height="16" rx="2" fill="{item.colour}"/>'
        )
        parts.append(_line(x(item.low), y + 8, x(item.high), y + 8, INK, width=1.4))
        parts.append(_text(WIDTH - right + 10, y + 13, item.text, MUTED))
    parts.append(_line(x(origin), 4, x(origin), height - 26, MUTED))
    return _svg(height, parts, "Gain by part")


def floors(rows: Sequence[tuple[str, float, float, float | None]]) -> str:
    """(label, as loaded ms, candidate ms, floor ms): bars of step time, each row to its own scale, the floor as a mark."""
    left, right, row = 210, 190, 46
    height = row * len(rows) + 12
    parts = []
    for index, (label, loaded, candidate, floor) in enumerate(rows):
        y = 8 + row * index
        scale = (WIDTH - left - right) / max(loaded, candidate)
        parts.append(_text(left - 10, y + 20, label, INK, "end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{loaded * scale:.1f}" height="13" rx="2" fill="{GREY}"/>')
        parts.append(
            f'<rect x="{left}" y="{y + 16}" width="{max(candidate * scale, 1):.1f}" height="13" rx="2" fill="{GREEN}"/>'
        )
        parts.append(_text(left + loaded * scale + 8, y + 11, f"{loaded:.3g} ms", MUTED))
        note = f"{candidate:.3g} ms"
        if floor:
            at = left + floor * scale
            parts.append(_line(at, y - 3, at, y + 32, RED, width=2))
            note += f" · {floor / candidate:.0%} of the bound"
        parts.append(_text(left + max(candidate, floor or 0.0) * scale + 8, y + 27, note, GREEN, weight=600))
    return _svg(height, parts, "Step time against the physical floor")


def _svg(height: int, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="{escape(label)}" '
        f'font-family="inherit" font-size="12">{"".join(parts)}</svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start", *, weight: int = 400) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _short(text: str, limit: int = 30) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
