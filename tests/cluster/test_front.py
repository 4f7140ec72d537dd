"""Campaigns with two objectives: the front is searched, measured cold, and shown; the first objective alone wins."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cluster.api import open_campaign
from cluster.campaign import run_campaign
from cluster.front import Standing, cold_front, search_front, spread
from cluster.journal import read_state
from cluster.plan import read_plan
from cluster.replay import replay
from cluster.standing import standing_lines, standing_of
from engines.fake import FakeEngine
from hotpass.records.candidate import Candidate
from hotpass.records.measurement import Estimate
from hotpass.records.shapes import Phase, ShapeRow
from search.objectives import TOKENS_PER_S, TTFT
from tests.cluster.campaigns import PARTS, make_running
from verification.gates import GATES

DECODE = {"quick-mlp": 0.7, "slow-norm": 1.2}
PREFILL = {"quick-mlp": 1.1, "quick-attention": 0.6, "slow-norm": 1.2}
"""The MLP's part makes decode quick and prefill slow, that of attention only prefill quick: together they are 1.45 times as fast in
tokens per second and 1.52 in time to first token, attention alone 1.12 and 1.67."""
OBJECTIVES = (TOKENS_PER_S, TTFT)


def step_ms(candidate: Candidate, row: ShapeRow) -> float:
    time = 20.0 * (1 + 0.02 * row.query_tokens + 1e-4 * row.context_mean)
    for use in candidate.parts:
        time *= (DECODE if row.phase is Phase.DECODE else PREFILL).get(use.source.name, 1.0)
    return time * 1.03 ** len(candidate.settings)


def engine() -> FakeEngine:
    def error(candidate: Candidate) -> float:
        return 1e-5 if candidate.parts else 0.0

    return FakeEngine("fake-0", step_time=step_ms, noise=0.002, logit_error=error)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("front") / "c"
    run_campaign(make_running(folder, engine=engine, objective="tokens_per_s,ttft", max_attempts=16))
    return folder


def test_the_front_is_measured_cold_and_the_first_objective_wins(done: Path) -> None:
    result = read_state(done).result
    assert result is not None
    assert [member["label"] for member in result["front"]] == ["quick-attention + quick-mlp", "quick-attention"]
    both, alone = result["front"]
    assert both["candidate"] == result["best"]["candidate"]
    assert (both["tokens_per_s"]["value"], both["ttft"]["value"]) == pytest.approx((1.45, 1.52), rel=0.03)
    assert (alone["tokens_per_s"]["value"], alone["ttft"]["value"]) == pytest.approx((1.12, 1.67), rel=0.03)
    low, high = alone["ttft"]["ci95"]
    assert 1.6 < low < alone["ttft"]["value"] < high < 1.75
    assert set(both["gates"].values()) == {"pass"}


def test_every_reader_shows_the_same_front(done: Path) -> None:
    campaign, state = open_campaign(done), read_state(done)
    ids = [member["candidate_id"] for member in state.front or ()]
    assert [best.candidate_id for best in campaign.front] == ids
    assert campaign.best is not None
    assert campaign.best.candidate_id == ids[0]
    assert campaign.front[1].spans[TTFT].value == pytest.approx(1.67, rel=0.03)
    assert list(search_front(state, OBJECTIVES)) == ids
    shown = io.StringIO()
    shown.writelines(standing_lines(standing_of(done), read_plan(done)))
    assert "on the front, cold: tokens_per_s 1.1" in shown.getvalue()
    report = (done / "report.html").read_text()
    assert "<h2>Two objectives</h2>" in report
    assert "the winner" in report


def test_a_replay_finds_the_same_finalists(done: Path) -> None:
    found = replay(done, PARTS)
    assert found.differing == ()
    assert found.same["finalists"] == 1


def test_one_objective_has_no_front(tmp_path: Path) -> None:
    result = run_campaign(make_running(tmp_path / "c", max_attempts=4, baselines=False))
    assert "front" not in result
    assert open_campaign(tmp_path / "c").front == ()
    assert standing_of(tmp_path / "c")["front"] == []


def standing(name: str, first: float, second: float, **gates: str) -> Standing:
    spans = {
        objective: Estimate(value=value, low=value * 0.98, high=value * 1.02)
        for objective, value in zip(OBJECTIVES, (first, second), strict=True)
    }
    return Standing(candidate_id=name, attempt_seq=1, spans=spans, gates={**dict.fromkeys(GATES, "pass"), **gates})


def test_only_what_is_sound_and_surely_better_in_one_is_on_the_cold_front() -> None:
    slower = standing("slower", 0.8, 1.5, cold="fail: slower: …")
    finalists = [
        standing("fast", 1.5, 1.0),
        slower,
        standing("wrong", 2.0, 2.0, logits="fail: differ"),
        standing("not run", 2.0, 2.0, weights="not run: …"),
        standing("equal", 1.01, 1.01),
    ]
    assert [found.candidate_id for found in cold_front(finalists, OBJECTIVES)] == ["fast", "slower"]


def test_finalists_of_a_long_front_are_its_ends_first() -> None:
    assert spread(list("abcdefg"), 3) == ["a", "g", "d"]
    assert spread(list("ab"), 3) == ["a", "b"]
    assert spread([], 3) == []
    assert spread(list("abc"), 1) == ["a"]
