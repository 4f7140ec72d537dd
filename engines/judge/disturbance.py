"""How long the incumbent is waited for beside a candidate, and whose time it was that ran out.

A candidate may keep a thread that takes the interpreter, the cores or the memory bus from the incumbent. Then it is the incumbent that
runs into the deadline: the judge gives up long before, and says so. Smaller disturbances are measured
(`MeasureResult.incumbent_disturbed`), and are `verification`'s to weigh; what is caught here is beyond any measuring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engines.program import CandidateFailed
from hotpass.records.measurement import Failure, FailureKind

if TYPE_CHECKING:
    from engines.judge.rounds import Place

WAIT_FACTOR = 10.0
"""A window of the incumbent is waited for so many times as long as it takes beside itself, and `WAIT_SECONDS` more."""

WAIT_SECONDS = 2.0
"""No hiccup of a machine that can measure at all takes so long."""

BLAMED_SHARE = 0.5
"""Where the incumbent lost more than this share of the time before a missed deadline, it was the disturbance that missed it."""


def patience_seconds(alone_seconds: float) -> float:
    """How long to wait for a window of the incumbent that takes `alone_seconds` beside itself."""
    return WAIT_FACTOR * alone_seconds + WAIT_SECONDS


def of_the_incumbent(failure: Failure, what: str, waited_seconds: float, alone_seconds: float) -> Failure:
    """What it means that the incumbent, beside a candidate, failed after so long a wait: a timeout is a disturbance when the incumbent
    was given far more than its time, and stays a timeout where the deadline left it none."""
    if failure.kind is not FailureKind.TIMEOUT or waited_seconds < WAIT_FACTOR * alone_seconds:
        return failure
    message = f"{what} had not ended after {waited_seconds:.1f} s, beside itself it takes {alone_seconds:.3f} s"
    return Failure(kind=FailureKind.DISTURBED, message=message, detail=failure.detail)


def share_slower(beside: Mapping[Place, Sequence[float]], alone: Mapping[Place, Sequence[float]]) -> float:
    """Of all pairs of one window beside the candidate and one without it, the share in which the one beside took longer (Mann and
    Whitney's): near 1/2 where only the machine was unsteady, near 1 where the candidate slows every window. 1 where nothing is known."""
    slower = pairs = 0.0
    for place, seconds in beside.items():
        for one in seconds:
            for other in alone.get(place, ()):
                pairs += 1
                slower += 1.0 if one > other else 0.5 if one == other else 0.0
    return slower / pairs if pairs else 1.0


def behind_a_timeout(failure: Failure, lost_seconds: float, elapsed_seconds: float) -> Failure:
    """A timeout of which the time that the incumbent lost is the cause says so."""
    if failure.kind is not FailureKind.TIMEOUT or lost_seconds <= BLAMED_SHARE * elapsed_seconds:
        return failure
    message = f"its windows took {lost_seconds:.1f} s of {elapsed_seconds:.1f} s more than beside itself"
    return Failure(kind=FailureKind.DISTURBED, message=message, detail=failure.detail)


def waited_for(error: CandidateFailed, what: str, waited_seconds: float, alone_seconds: float) -> CandidateFailed:
    """The error to raise instead of one that came out of the incumbent's side."""
    return CandidateFailed(of_the_incumbent(error.failure, what, waited_seconds, alone_seconds))
