"""A whole campaign on the decoder engine with a tiny model: killed, resumed, continued on other traffic. Everything is real but small."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.journal import read_state
from cluster.plan import read_plan
from engines.prepare.tiny import make_tiny_model
from hotpass.records.measurement import Purpose

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

VICTIM = textwrap.dedent(
    """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    from cluster.cli import main
    from cluster.session import Session

    recorded = Session.record_attempt

    def dies(self, *given):
        row = recorded(self, *given)
        if len(self.state.attempts) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    Session.record_attempt = dies
    main(sys.argv[2:])
    """
)


def test_a_killed_campaign_goes_on_and_its_winner_is_where_the_next_one_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = str(make_tiny_model(tmp_path / "model")), tmp_path / "c"
    options = ["--requests", "20", "--budget", "3m", "--no-ray", "--no-baselines", "--quiet"]
    start = ["compile", "--model", model, "--traffic", "chat", *options, "--max-attempts", "3", "--out", str(folder)]
    # The pipe is inherited by every process of the engine: `run` returns when the last of them has ended.
    killed = subprocess.run(
        [sys.executable, "-c", VICTIM, str(ROOT), *start],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    assert killed.returncode == -9
    before = read_state(folder)
    assert len(before.attempts) == 3
    assert before.attempts[0].attempt.purpose is Purpose.AA

    assert main(["compile", "--resume", str(folder), "--no-ray", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    after = read_state(folder)
    assert [row.attempt for row in after.attempts[:3]] == [row.attempt for row in before.attempts]
    assert len({row.assignment for row in after.attempts}) == len(after.attempts)
    assert after.decisions["start"] == 2
    assert result["attempts"] == len(after.search_attempts()) > 2
    assert (folder / "report.html").is_file()

    again = tmp_path / "again"
    assert (
        main(
            [
                "compile",
                "--continue",
                str(folder),
                "--traffic",
                "code",
                *options,
                "--max-attempts",
                "1",
                "--out",
                str(again),
            ]
        )
        == 0
    )
    continued = json.loads(capsys.readouterr().out)["continued"]
    assert 0 < continued["shape_distance"] <= 1
    first = next(row.attempt for row in read_state(again).attempts if row.attempt.purpose is Purpose.SEARCH)
    plan = read_plan(again)
    assert plan.continued is not None
    assert first.candidate_id == plan.continued.candidate.id
    assert any("apart" in note for note in plan.notes)
