"""One check and what came of it. A check returns figures, or says why it cannot be made, or why it failed; anything else it raises is a
failure too, so that one broken check never hides the others."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.cuda.driver import CudaDriver, Driver
from engines.cuda.testing import FileDriver

Figures = Mapping[str, object]


class Skipped(Exception):
    """The check means nothing here; the text says why."""


class Wrong(Exception):
    """What was checked does not hold; the text says how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where checks run."""

    device: str
    """`cuda`, or `cpu` to try the checks themselves: device memory is files then."""
    folder: Path
    """For models and files; empty at first, removed afterwards."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def needs_gpu(self, what: str) -> None:
        """Raises Skipped on a CPU."""
        if not self.on_gpu:
            raise Skipped(f"{what} without a GPU")

    def driver(self) -> Driver:
        return CudaDriver(self.device) if self.on_gpu else FileDriver(self.folder)


Check = Callable[[Place], Figures]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one check."""

    name: str
    status: str
    """`passed`, `failed` or `skipped`."""
    reason: str = ""
    """Why it failed or was skipped; empty when it passed."""
    figures: Figures = field(default_factory=dict)


def run_checks(checks: Iterable[tuple[str, Check]], place: Place) -> list[Outcome]:
    """Each check in turn; each outcome is printed as it comes."""
    outcomes = []
    for name, check in checks:
        outcome = run_check(name, check, place)
        told = outcome.reason or ", ".join(f"{key} {_short(value)}" for key, value in outcome.figures.items())
        print(f"{outcome.status:8} {name:34} {told}", file=sys.stderr, flush=True)
        outcomes.append(outcome)
    return outcomes


def run_check(name: str, check: Check, place: Place) -> Outcome:
    """Never raises, but for an interrupt."""
    try:
        return Outcome(name=name, status="passed", figures=dict(check(place)))
    except Skipped as reason:
        return Outcome(name=name, status="skipped", reason=str(reason))
    except ImportError as error:
        return Outcome(name=name, status="skipped", reason=f"needs {error.name or error}")
    except Wrong as reason:
        return Outcome(name=name, status="failed", reason=str(reason))
    except Exception as error:
        traceback.print_exc()
        return Outcome(name=name, status="failed", reason=f"{type(error).__name__}: {error}"[:500])


def expect(holds: bool, otherwise: str) -> None:
    """Raises Wrong."""
    if not holds:
        raise Wrong(otherwise)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
