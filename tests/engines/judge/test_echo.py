"""A window's answer names the candidate and the weights that it is of; another is rejected and ends the child."""

from __future__ import annotations

import pytest

from engines.judge.windows import check_echo
from engines.program import CandidateFailed, WindowReply
from hotpass.records.measurement import Failure, FailureKind


class BookedChild:
    """What the judge knows of a child, without one."""

    def __init__(self) -> None:
        self.installed = {"candidate": "b" * 64}
        self.epoch = ""

    def broken(self, problem: str) -> CandidateFailed:
        return CandidateFailed(Failure(kind=FailureKind.PROTOCOL, message=problem))


def reply(candidate_id: str, epoch: str) -> WindowReply:
    return WindowReply(nonce="n", seconds=1.0, steps=1, candidate_id=candidate_id, epoch=epoch)


def test_what_was_installed_may_answer_and_so_may_a_program_that_keeps_no_book() -> None:
    child = BookedChild()
    for _ in range(2):
        check_echo(child, "candidate", reply("b" * 64, "e1"))
    check_echo(child, "incumbent", reply("a" * 64, "e1"))
    assert child.epoch == "e1"
    check_echo(BookedChild(), "candidate", reply("", ""))


def test_another_candidates_answer_is_rejected() -> None:
    with pytest.raises(CandidateFailed, match="cccccccccc answered on the side of bbbbbbbbbb"):
        check_echo(BookedChild(), "candidate", reply("c" * 64, "e1"))


def test_an_answer_on_other_weights_is_rejected() -> None:
    child = BookedChild()
    check_echo(child, "candidate", reply("b" * 64, "e1"))
    with pytest.raises(CandidateFailed, match="the weights' epoch was e1 and is e2"):
        check_echo(child, "candidate", reply("b" * 64, "e2"))
