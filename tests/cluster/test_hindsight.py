"""Looking back: the same decisions in a replay, warm starts, campaigns compared, one best, where a campaign stands, full disks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.campaign import _mirrored, run_campaign
from cluster.commands.hindsight import status
from cluster.comparing import compare_plan, differences, measure_winners, read_campaigns, why_not_comparable
from cluster.events import Event, EventLog, read_events
from cluster.journal import FOLDER, PASSED_OVER, read_state
from cluster.mirrored import fetch_best
from cluster.plan import read_plan
from cluster.replay import replay
from cluster.standing import standing_lines, standing_of
from cluster.state import fold
from cluster.warm import FOLDER as WARM
from cluster.warm import warm_of
from hotpass.errors import InputError
from tests.cluster.campaigns import PARTS, make_plan, make_running
from tests.cluster.test_campaign import interrupted_campaign


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hindsight") / "c"
    run_campaign(make_running(folder, control="random", control_share=0.2, max_attempts=30))
    return folder


def test_a_replay_finds_every_decision_again(done: Path) -> None:
    found = replay(done, PARTS)
    assert found.differing == ()
    assert found.same["turn"] > 20
    assert found.same["proposal"] > 20
    assert found.same.keys() >= {"space", "incumbent", "stop", "finalists", "order", "prediction"}


def test_a_replay_of_a_resumed_campaign_finds_them_too(tmp_path: Path) -> None:
    interrupted_campaign(tmp_path / "c")
    run_campaign(make_running(tmp_path / "c"))
    assert replay(tmp_path / "c", PARTS).differing == ()


def test_a_decision_that_was_tampered_with_is_found(done: Path, tmp_path: Path) -> None:
    """Another incumbent than the attempts deserve, and a turn of somebody who had earned less."""
    folder = tmp_path / "c"
    folder.mkdir()
    for name in ("campaign.json", "briefing.json", "candidates"):
        (folder / name).symlink_to(done / name)
    changed = False
    with EventLog.open(folder / FOLDER) as log:
        for event in read_events(done / FOLDER):
            log.append(event.kind, tampered(event))
            changed = changed or tampered(event) != event.payload
    assert changed
    assert {item.decision for item in replay(folder, PARTS).differing} >= {"turn"}


def tampered(event: Event) -> dict[str, object]:
    payload = dict(event.payload)
    if payload.get("decision") == "turn" and len(payload["arms"]) > 1:
        payload["arm"] = next(arm for arm in payload["arms"] if arm != payload["arm"])
    return payload


def test_other_parts_than_then_are_seen_at_once(done: Path) -> None:
    differing = replay(done, PARTS[:2]).differing
    assert differing[0].decision == "space"


def test_a_warm_start_tries_what_was_fast_there_first_and_measures_it_again(done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    catalogue = tuple(source for source in PARTS if not source.name.startswith("quick"))
    run_campaign(make_running(folder, parts=catalogue, warm_start=str(done), max_attempts=8))
    state = read_state(folder)
    first = next(iter(state.candidates.values()))
    assert first.proposer == "warm"
    assert set(first.parts) == {"quick-mlp", "quick-attention"}
    assert "times as fast as loaded in" in first.hypothesis
    assert state.attempts_of(first.candidate_id), "measured here, whatever it was there"
    assert (folder / WARM / "worth.json").is_file()
    assert replay(folder, catalogue).differing == ()


def test_a_warm_start_and_the_best_are_read_from_mlflow_alone(tmp_path: Path) -> None:
    """A campaign mirrored into a store of its own; its folder goes, and another one begins with its parts."""
    uri = f"sqlite:///{tmp_path / 'store.db'}"
    first, folder = tmp_path / "first", tmp_path / "c"
    running = make_running(first, tracking_uri=uri, max_attempts=8, baselines=False)
    running.mirrored = _mirrored
    result = run_campaign(running)
    best = fetch_best(uri, "first")
    assert best is not None
    assert (best.candidate_id, best.speedup_vs_loaded.value) == (
        result["best"]["candidate"],
        result["best"]["speedup_vs_loaded"]["value"],
    )
    shutil.rmtree(first)
    catalogue = tuple(source for source in PARTS if not source.name.startswith("quick"))
    given = {"warm_start": "mlflow:first", "tracking_uri": uri, "max_attempts": 8, "baselines": False}
    again = run_campaign(make_running(folder, parts=catalogue, **given))
    assert next(iter(read_state(folder).candidates.values())).proposer == "warm"
    assert again["best"]["candidate"] == result["best"]["candidate"], (
        "measured here, and the same sources byte for byte"
    )
    assert replay(folder, catalogue).differing == ()
    with pytest.raises(InputError, match="is not there"):
        warm_of(make_plan(tmp_path / "d", **{**given, "warm_start": "mlflow:second"}), tmp_path / "d")
    with pytest.raises(InputError, match="is not there"):
        fetch_best(uri, "second")


def test_a_tuner_takes_turns_and_a_replay_finds_what_it_asked(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    run_campaign(make_running(folder, tuner="gp", max_attempts=30))
    state = read_state(folder)
    assert any(info.proposer == "tuner" and state.attempts_of(key) for key, info in state.candidates.items())
    assert replay(folder, PARTS).differing == ()


def test_a_warm_start_from_nothing_is_wrong_input(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "c", warm_start=str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"has no campaign\.json"):
        warm_of(plan, tmp_path / "c")
    with pytest.raises(InputError, match="needs the server that has it"):
        warm_of(make_plan(tmp_path / "c", warm_start="mlflow:some"), tmp_path / "c")


def test_campaigns_of_one_deployment_are_compared_in_one_session(done: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run_campaign(make_running(other, parts=PARTS[:1], max_attempts=5, seed=1))
    campaigns = read_campaigns([done, other])
    assert why_not_comparable(campaigns) == ""
    assert "spec.control" in differences(*campaigns)
    running = make_running(tmp_path / "compare")
    running.plan = compare_plan(campaigns[0].plan, tmp_path / "compare")
    pairs = measure_winners(running, campaigns)
    assert [(pair.candidate, pair.over) for pair in pairs] == [
        (str(done), "as loaded"), (str(other), "as loaded"), (str(other), str(done)),
    ]  # fmt: skip
    direct = pairs[2].attempt.speedup
    assert direct is not None
    assert direct.value == pytest.approx(0.8, rel=0.03), "without the other quick part"


def test_campaigns_of_two_deployments_are_not_compared_and_the_reason_is_told(done: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    running = make_running(other, max_attempts=2)
    deployment = running.plan.deployment
    running.plan = replace(running.plan, deployment=replace(deployment, concurrency=2))
    run_campaign(running)
    reason = why_not_comparable(read_campaigns([done, other]))
    assert reason.startswith(f"not comparable: {other} is of another deployment (deployment.concurrency")
    with pytest.raises(InputError, match="is one campaign"):
        read_campaigns([done])


def test_only_an_explicit_pass_of_every_gate_makes_a_best(done: Path) -> None:
    state = read_state(done)
    best = state.best()
    assert best is not None
    assert state.winner is not None
    for gates in ({}, {**state.winner["gates"], "weights": "not run: no engine"}, {"cold": "pass"}):
        state.winner = {**state.winner, "gates": gates}
        assert state.best() is None


def test_the_state_is_the_same_without_a_look_into_what_it_keeps_nothing_of(done: Path) -> None:
    lines = [line for path in sorted((done / FOLDER).glob("*.jsonl")) for line in path.read_bytes().splitlines()]
    passed = [json.loads(line) for line in lines if PASSED_OVER.match(line)]
    assert {event["kind"] for event in passed} == {"lease", "measurement"}
    assert {e["payload"]["purpose"] for e in passed if e["kind"] == "measurement"} <= {"search", "remeasure", "audit"}
    assert read_state(done) == fold(read_events(done / FOLDER))


def test_status_tells_engines_queue_spend_and_reasons(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    standing = standing_of(done)
    assert standing["status"] == "done"
    assert standing["best"] == standing["leading"]
    assert {row["verdict"] for row in standing["rejected"]} >= {"failed"}
    assert any("SIGSEGV" in row["reason"] for row in standing["rejected"])
    assert {row["name"] for row in standing["proposers"]} >= {"control", "screening"}
    assert sum(row["attempts"] for row in standing["proposers"]) >= 30
    assert any(line.startswith("  best: ") for line in standing_lines(standing, read_plan(done)))

    class Arguments:
        folder, json = str(done), True

    assert status(Arguments()) == 0  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["attempts"] == standing["attempts"]


VICTIM = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
from cluster.campaign import run_campaign
from tests.cluster.campaigns import make_running
run_campaign(make_running(Path(sys.argv[1])))
"""


def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """No file may grow beyond 40 kB: the log cannot. With room again the campaign goes on, each attempt once."""
    folder, root = tmp_path / "c", Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", VICTIM, str(folder), str(root)], check=False, capture_output=True, text=True
    )
    assert "cannot take an event" in done.stderr
    before = [row.attempt for row in read_state(folder).attempts]
    assert before
    result = run_campaign(make_running(folder))
    after = read_state(folder)
    assert [row.attempt for row in after.attempts[: len(before)]] == before
    assert max(Counter(row.assignment for row in after.attempts).values()) == 1
    assert result["verdict"] == "faster"


def test_a_candidate_torn_by_a_crash_is_put_aside_and_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    interrupted_campaign(folder)
    torn = folder / "candidates" / ("f" * 64)
    torn.mkdir()
    (torn / "candidate.toml").write_text("")
    assert run_campaign(make_running(folder))["verdict"] == "faster"
    assert not torn.exists()
    assert (folder / "candidates" / ".torn" / torn.name / "candidate.toml").exists()
