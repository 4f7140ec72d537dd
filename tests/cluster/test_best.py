"""One best, whoever asks: command line, Python, MLflow, release; and nothing that lacks a gate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.api import Campaign
from cluster.best import Claim, claim_in
from cluster.campaign import _mirrored, run_campaign
from cluster.cli import main
from cluster.journal import read_state
from engines.fake import FakeEngine, step_time_from_costs
from hotpass.decode import from_plain
from hotpass.records.measurement import Purpose
from tests.cluster.campaigns import FACTORS, fake, make_running


class ChangesWeights(FakeEngine):
    """As fast as the other fake; the full hash of its weights is never that of the load."""

    def verify_weights(self) -> bool:
        return False


def changes_weights() -> FakeEngine:
    times = step_time_from_costs(20.0, FACTORS)
    return ChangesWeights("fake-0", step_time=times, logit_error=lambda candidate: 1e-5 if candidate.parts else 0.0)


def run(folder: Path, uri: str, engine: Callable[[], FakeEngine]) -> Path:
    running = make_running(folder, engine=engine, tracking_uri=uri, max_attempts=8, baselines=False)
    running.mirrored = _mirrored
    run_campaign(running)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'store.db'}"


@pytest.fixture(scope="module")
def won(tmp_path_factory: pytest.TempPathFactory, store: str) -> Path:
    return run(tmp_path_factory.mktemp("best") / "won", store, fake)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory, store: str) -> Path:
    """Its fastest lacks one gate: `weights`."""
    return run(tmp_path_factory.mktemp("best") / "gated", store, changes_weights)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(["best", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)["best"]


def test_command_api_mlflow_and_release_name_the_same_best(
    won: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, by_folder = told(capsys, str(won))
    assert code == 0
    assert told(capsys, f"mlflow:{won.name}", "--tracking-uri", store) == (0, by_folder)
    claim = from_plain(Claim, by_folder)
    shown = Campaign(won).best
    assert shown is not None
    assert (shown.candidate_id, shown.label, dict(shown.gates)) == (claim.candidate_id, claim.label, dict(claim.gates))
    assert round(shown.speedup_vs_loaded.value, 4) == claim.speedup_vs_loaded.value
    assert claim.speedup_vs_loaded.kind == "simulated"
    result = json.loads((won / "result.json").read_text())["best"]
    assert (result["candidate"], result["speedup_vs_loaded"]["value"], result["tokens_per_s"]) == (
        claim.candidate_id,
        claim.speedup_vs_loaded.value,
        claim.tokens_per_s,
    )
    released = json.loads((won / "release" / "evidence.json").read_text())
    assert claim.candidate_id in json.dumps(released)


def test_what_was_faster_and_lacks_a_gate_is_no_best_anywhere(
    gated: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cold = [row for row in read_state(gated).attempts if row.attempt.purpose is Purpose.COLD]
    assert any(row.speedup_vs_loaded and row.speedup_vs_loaded.low > 1.1 for row in cold), "faster, cold too"
    assert told(capsys, str(gated)) == (1, None)
    assert told(capsys, f"mlflow:{gated.name}", "--tracking-uri", store) == (1, None)
    assert Campaign(gated).best is None
    assert json.loads((gated / "result.json").read_text())["best"] is None
    assert not (gated / "release").exists()
    assert main(["best", str(gated)]) == 1
    assert "passed every gate" in capsys.readouterr().out


def test_people_read_the_claim_and_its_gates(won: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["best", str(won)]) == 0
    text = capsys.readouterr().out
    assert "simulated as loaded" in text
    assert "gates passed: logits, greedy-agreement, weights, cold" in text


def test_a_campaign_that_is_not_there_is_one_sentence(
    tmp_path: Path, store: str, won: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in (
        ([str(tmp_path)], "has no campaign.json"),
        (["mlflow:some"], "give --tracking-uri too"),
        (["mlflow:some", "--tracking-uri", store], "is not there"),
        ([str(won), "--tracking-uri", store], "is not asked about a folder"),
    ):
        assert main(["best", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert claim_in(str(won)) is not None
