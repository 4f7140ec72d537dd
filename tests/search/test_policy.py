"""What is not tried again, when the machine is suspected, and when a search stops."""

from __future__ import annotations

import pytest

from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate, PartUse
from hotpass.records.measurement import Verdict
from search.budget import Budget, Spent, parse_duration, reason_to_stop
from search.policy import breakers, machine_suspect
from tests.search.builders import attempt, part

A, B = part("a", ["model"], params={"n": (1, 2)}), part("b", ["model.layers.*.mlp"])


def made(*uses: tuple[object, dict[str, int]], **settings: object) -> Candidate:
    return Candidate(
        parts=tuple(PartUse(source=source, params=params) for source, params in uses),  # type: ignore[arg-type]
        settings=settings,  # type: ignore[arg-type]
    )


def test_a_part_that_fails_alike_three_times_is_blamed() -> None:
    candidates = {c.id: c for c in (made((A, {"n": 1})), made((A, {"n": 2})), made((A, {"n": 1}), threads=1))}
    attempts = [
        attempt(c, AS_LOADED.id, verdict=Verdict.FAILED, reason=f"signal {i}") for i, c in enumerate(candidates)
    ]
    assert breakers(attempts[:2], candidates) == []
    (found,) = breakers(attempts, candidates)
    assert (found.part_sha256, found.name, found.family) == (A.sha256, "", "failed: signal #")
    assert found.candidates == tuple(sorted(candidates))
    assert breakers([*attempts[:2], attempts[1]], candidates) == [], "the same candidate again is no new evidence"


def test_what_was_ever_timed_is_innocent() -> None:
    fails = [made((A, {"n": 2})), made((A, {"n": 2}), threads=1), made((A, {"n": 2}), threads=2)]
    works = made((A, {"n": 1}), threads=1)
    candidates = {c.id: c for c in (*fails, works)}
    attempts = [attempt(c.id, AS_LOADED.id, verdict=Verdict.INCORRECT, reason="wrong") for c in fails]
    (found,) = breakers([*attempts, attempt(works.id, AS_LOADED.id, 1.5)], candidates)
    assert (found.part_sha256, found.name, found.value_json) == (A.sha256, "n", "2")


def test_different_failures_and_invalid_attempts_open_nothing() -> None:
    candidates = {c.id: c for c in (made((A, {"n": 1})), made((A, {"n": 2})), made((A, {"n": 1}), threads=1))}
    reasons = ["out of memory", "signal 11", "wrong logits"]
    mixed = [
        attempt(c, AS_LOADED.id, verdict=Verdict.FAILED, reason=reason)
        for c, reason in zip(candidates, reasons, strict=True)
    ]
    assert breakers(mixed, candidates) == []
    invalid = [attempt(c, AS_LOADED.id, verdict=Verdict.INVALID, reason="disturbed") for c in candidates]
    assert breakers(invalid, candidates) == []


def test_a_setting_is_blamed_when_no_part_explains_the_failures() -> None:
    candidates = {c.id: c for c in (made(compile_mode="default", threads=t) for t in (1, 2, 3))}
    attempts = [attempt(c, AS_LOADED.id, verdict=Verdict.FAILED, reason="no compiler") for c in candidates]
    (found,) = breakers(attempts, candidates)
    assert (found.part_sha256, found.name, found.value_json) == ("", "compile_mode", '"default"')


def test_failures_without_anything_in_common_suspect_the_machine() -> None:
    several = [made((A if i % 2 else B, {"n": 1} if i % 2 else {}), threads=i + 1) for i in range(6)]
    candidates = {c.id: c for c in several}
    attempts = [attempt(c.id, AS_LOADED.id, verdict=Verdict.FAILED, reason=f"{c.id}") for c in several]
    assert machine_suspect(attempts, candidates)
    assert not machine_suspect(attempts[:5], candidates)
    assert not machine_suspect([*attempts[:5], attempt("x", AS_LOADED.id, 1.1)], candidates)
    same = [made((A, {"n": 1}), threads=i + 1) for i in range(6)]
    blamed = [attempt(c.id, AS_LOADED.id, verdict=Verdict.FAILED, reason="x") for c in same]
    assert not machine_suspect(blamed, {c.id: c for c in same})


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("1.5h", 5400), ("1h30m", 5400), (" 45 ", 45)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5 minutes", "-5m", "0s", "m5", "5m30", "nan", "1e9s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("limit", "reached", "words"),
    [
        ({"wall_seconds": 300}, {"wall_seconds": 300}, "300 s are spent"),
        ({"engine_seconds": 60}, {"engine_seconds": 61}, "60 engine seconds"),
        ({"attempts": 30}, {"attempts": 30}, "30 attempts"),
        ({"target_speedup": 3}, {"speedup_low": 3.1}, "target of 3 times"),
        ({"idle_attempts": 5, "idle_seconds": 10}, {"idle_attempts": 6, "idle_seconds": 11}, "no new incumbent in 6"),
    ],
)
def test_each_limit_stops_by_itself(limit: dict[str, float], reached: dict[str, float], words: str) -> None:
    nothing = {
        "wall_seconds": 0.0, "engine_seconds": 0.0, "attempts": 0, "speedup_low": 1.0, "idle_attempts": 0, "idle_seconds": 0.0,
    }  # fmt: skip
    budget = Budget(**limit)  # type: ignore[arg-type]
    assert words in reason_to_stop(budget, Spent(**{**nothing, **reached}))  # type: ignore[arg-type]
    assert reason_to_stop(budget, Spent(**nothing)) == ""  # type: ignore[arg-type]
    assert reason_to_stop(Budget(), Spent(**{**nothing, **reached})) == ""  # type: ignore[arg-type]
    patient = {**nothing, "idle_attempts": 100}
    assert reason_to_stop(Budget(idle_attempts=5, idle_seconds=10), Spent(**patient)) == ""  # type: ignore[arg-type]
