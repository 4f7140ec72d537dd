"""Stamps of a replay by hand: a child that is a script, a clock that is a list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engines.judge import replay
from engines.program import CandidateFailed, Echo, ReplayReply, ReplayRequest, StepEvent
from engines.wire import Message
from hotpass.decode import from_plain, json_safe
from hotpass.records.measurement import Failure, FailureKind

OWN = Echo(candidate_id="b" * 64, epoch="e1")


class ScriptedChild:
    """Answers a replay with these steps, each a list of (request, token)."""

    def __init__(self, steps: list[list[tuple[int, int]]], served_by: Echo) -> None:
        self.messages: Iterator[Message] = iter(
            [Message(kind="step", body=json_safe(event(number, step))) for number, step in enumerate(steps)]
            + [Message(kind="ok", body=json_safe(ReplayReply(activation={"model": len(steps)}, echo=served_by)))]
        )
        self.installed = {"candidate": "b" * 64}
        self.epoch = "e1"

    def start(self, kind: str, body: Any, *, deadline: float, blob: bytes) -> None:
        assert kind == "replay"
        assert len(blob) == 8 * sum(item["length"] for item in body["requests"])

    def next_message(self, deadline: float) -> Message:
        return next(self.messages)

    def decoded(self, record: Any, plain: Any) -> Any:
        return from_plain(record, plain)

    def broken(self, problem: str) -> CandidateFailed:
        return CandidateFailed(Failure(kind=FailureKind.PROTOCOL, message=problem))


def event(number: int, made: list[tuple[int, int]]) -> StepEvent:
    return StepEvent(
        step=number,
        finished_tokens=tuple(made),
        phase="decode",
        num_seqs=1,
        query_tokens=1,
        child_seconds=0.0,
    )


def request(number: int, output_tokens: int) -> ReplayRequest:
    return ReplayRequest(request_id=number, tokens=(1, 2), output_tokens=output_tokens)


def run(
    steps: list[list[tuple[int, int]]],
    requests: list[ReplayRequest],
    monkeypatch: pytest.MonkeyPatch,
    served_by: Echo = OWN,
) -> Any:
    times = iter(range(100))
    monkeypatch.setattr(replay.time, "perf_counter", lambda: float(next(times)))
    return replay.run_replay(ScriptedChild(steps, served_by), "candidate", requests, 2, 1e9)  # type: ignore[arg-type]


def test_times_are_the_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps arrive at 1, 2, 3, 4 s; two clients, so that request 2 is submitted when request 0 has ended, at 2 s.
    steps = [[(0, 7)], [(0, 8), (1, 5)], [(1, 5), (2, 9)], [(1, 5)]]
    found = run(steps, [request(0, 2), request(1, 3), request(2, 1)], monkeypatch)
    assert found.stats.ttft_ms == (1000.0, 2000.0, 1000.0)
    assert found.stats.tpot_ms == (1000.0, 1000.0)
    assert (found.stats.steps, found.stats.output_tokens, found.stats.wall_seconds) == (4, 6, 5.0)
    assert found.tokens == {0: (7, 8), 1: (5, 5, 5), 2: (9,)}
    assert found.activation == {"model": 4}


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([[(0, 7)]], "did not get the tokens"),
        ([[(0, 7), (0, 7), (0, 7)]], "did not ask for it"),
        ([[(5, 7)]], "did not ask for it"),
    ],
    ids=["ends early", "too many", "nobody's"],
)
def test_other_tokens_than_asked_for_are_a_failure(
    steps: list[list[tuple[int, int]]], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CandidateFailed, match=problem):
        run(steps, [request(0, 2)], monkeypatch)


def test_requests_are_as_many_as_the_tokens_take() -> None:
    made = [request(number, 10) for number in range(10)]
    assert len(replay.requests_for(made, 35, 2)) == 4
    assert len(replay.requests_for(made, 1, 3)) == 3
    assert len(replay.requests_for(made, 1e9, 3)) == 10


@pytest.mark.parametrize("served_by", [replace(OWN, candidate_id="c" * 64), replace(OWN, epoch="e0")])
def test_a_replay_served_by_another_is_rejected(served_by: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CandidateFailed, match="answered"):
        run([[(0, 7)]], [request(0, 1)], monkeypatch, served_by)
