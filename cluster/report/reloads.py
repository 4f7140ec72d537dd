"""What reloads cost, by reload class: how many attempts, and how long, from the phases that the measurements recorded. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hotpass.records.candidate import Reload

RETURN_PHASES = ("restore", "clean")
"""Phases of a measurement in which the engine gets back to as loaded, and proves it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReloadCost:
    """Of the attempts whose candidate was one class."""

    kind: Reload
    attempts: int
    costlier_than_declared: int
    """Attempts whose candidate declared a cheaper class than it turned out to be."""
    install_ms: float
    """Median of one install, its warm-up included."""
    warm_up_ms: float
    """Median part of that in which the candidate's own passes ran (and compiled)."""
    return_ms: float
    """Median of taking it off and proving the engine clean; 0 where every one was measured in processes of its own."""
    total_seconds: float
    """All of it together, over all attempts."""


def reload_costs(results: Iterable[Mapping[str, Any]]) -> list[ReloadCost]:
    """One entry a class that occurred, cheapest first. `results`: as the log has them (`MeasureResult`, plain)."""
    found: dict[Reload, list[tuple[bool, float, float, float]]] = defaultdict(list)
    for result in results:
        installs = [report for report in result.get("reloads", ()) if report.get("side") == "candidate"]
        if not installs:
            continue
        kind = max((Reload(report["actual"]) for report in installs), key=lambda kind: kind.rank)
        declared = max((Reload(report["declared"]) for report in installs), key=lambda kind: kind.rank)
        phases = result.get("phases_ms", {})
        install = sum(sum(map(float, report["phases_ms"].values())) for report in installs)
        warm_up = sum(
            float(report["phases_ms"].get(name, 0.0)) for report in installs for name in ("warm-up", "compile")
        )
        back = sum(float(phases.get(name, 0.0)) for name in RETURN_PHASES)
        found[kind].append((kind.rank > declared.rank, install, warm_up, back))
    return [_cost(kind, found[kind]) for kind in Reload if kind in found]


def _cost(kind: Reload, attempts: list[tuple[bool, float, float, float]]) -> ReloadCost:
    returns = [back for *_, back in attempts if back]
    return ReloadCost(
        kind=kind,
        attempts=len(attempts),
        costlier_than_declared=sum(costlier for costlier, *_ in attempts),
        install_ms=statistics.median(install for _, install, _, _ in attempts),
        warm_up_ms=statistics.median(warm_up for _, _, warm_up, _ in attempts),
        return_ms=statistics.median(returns) if returns else 0.0,
        total_seconds=sum(install + back for _, install, _, back in attempts) / 1e3,
    )
