"""When a search stops: budgets as people write them, what was spent, and the first limit that is reached. No clock here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hotpass.errors import InputError

FORMS = "write it as 90s, 5m, 1h or 1h30m"
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits of one search; 0 means no such limit."""

    wall_seconds: float = 0.0
    engine_seconds: float = 0.0
    attempts: int = 0
    target_speedup: float = 0.0
    """Over the deployment as loaded; reached when the lower end of the incumbent's interval is."""
    idle_attempts: int = 0
    """Attempts without a new incumbent after which there is no progress, provided `idle_seconds` passed too."""
    idle_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What a search has used and reached."""

    wall_seconds: float
    engine_seconds: float
    attempts: int
    """Acknowledged attempts of the search: A/A, baselines and cold measurements are not among them."""
    speedup_low: float
    """Lower end of the incumbent's interval over as loaded; 1 at the start."""
    idle_attempts: int
    """Attempts since the incumbent changed (or the search began)."""
    idle_seconds: float
    """Time since then."""


def reason_to_stop(budget: Budget, spent: Spent) -> str:
    """Empty while the search should go on, else the first limit that is reached, in words."""
    if budget.target_speedup and spent.speedup_low >= budget.target_speedup:
        return f"the target of {budget.target_speedup:g} times as loaded is reached (at least {spent.speedup_low:.2f})"
    if budget.wall_seconds and spent.wall_seconds >= budget.wall_seconds:
        return f"{budget.wall_seconds:.0f} s are spent"
    if budget.engine_seconds and spent.engine_seconds >= budget.engine_seconds:
        return f"{budget.engine_seconds:.0f} engine seconds are spent"
    if budget.attempts and spent.attempts >= budget.attempts:
        return f"{budget.attempts} attempts were asked for"
    if (
        budget.idle_attempts
        and spent.idle_attempts >= budget.idle_attempts
        and spent.idle_seconds >= budget.idle_seconds
    ):
        return f"no new incumbent in {spent.idle_attempts} attempts and {spent.idle_seconds:.0f} s"
    return ""


def parse_duration(text: object, field: str = "budget") -> float:
    """Seconds of `90s`, `5m`, `1.5h`, `1h30m`; a bare number as text is seconds. Raises InputError unless above 0.

    A number that is no text (a campaign file, Python) has no unit, so nobody knows what was meant."""
    if not isinstance(text, str):
        remedy = f'write it as text with a unit: "{text}m", or as 90s, 5m, 1h or 1h30m' if _is_number(text) else FORMS
        raise InputError(field, text, "is not a duration: it has no unit", remedy)
    pieces = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)", text)
    whole = re.fullmatch(r"\s*(?:[0-9]+(?:\.[0-9]+)?\s*[smhd]?\s*)+", text)
    seconds = sum(float(number) * UNITS[unit or "s"] for number, unit in pieces) if whole else 0.0
    if seconds <= 0 or (len(pieces) > 1 and not all(unit for _, unit in pieces)):
        raise InputError(field, text, "is not a duration", FORMS)
    return seconds


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
