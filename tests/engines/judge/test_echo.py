"""An answer names the candidate and the weights that it is of; another is rejected and ends the child.

That each engine's program is found out when its own book goes stale is in the conformance suite.
"""

from __future__ import annotations

import pytest

from engines.judge.windows import check_echo
from engines.program import CandidateFailed, Echo
from hotpass.records.candidate import AS_LOADED
from hotpass.records.measurement import Failure, FailureKind


class BookedChild:
    """What the judge knows of a child, without one."""

    def __init__(self) -> None:
        self.installed = {"candidate": "b" * 64}
        self.epoch = "e1"

    def broken(self, problem: str) -> CandidateFailed:
        return CandidateFailed(Failure(kind=FailureKind.PROTOCOL, message=problem))


def test_what_was_installed_may_answer() -> None:
    check_echo(BookedChild(), "candidate", Echo(candidate_id="b" * 64, epoch="e1"))
    check_echo(BookedChild(), "incumbent", Echo(candidate_id=AS_LOADED.id, epoch="e1"))


@pytest.mark.parametrize(
    ("side", "echo", "problem"),
    [
        ("candidate", Echo(candidate_id="c" * 64, epoch="e1"), "cccccccccc answered on the side of bbbbbbbbbb"),
        ("incumbent", Echo(candidate_id="b" * 64, epoch="e1"), "bbbbbbbbbb answered on the side of"),
        ("candidate", Echo(candidate_id="b" * 64, epoch="e0"), "the weights' epoch is e1, but e0 answered"),
        ("candidate", Echo(candidate_id="b" * 64, epoch=""), "the weights' epoch is e1, but  answered"),
        ("candidate", None, "does not say whose it is"),
    ],
)
def test_anyone_else_is_rejected(side: str, echo: Echo | None, problem: str) -> None:
    with pytest.raises(CandidateFailed, match=problem):
        check_echo(BookedChild(), side, echo)
