"""The command line: exit codes, one sentence for wrong input, and the JSON line last on stdout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.campaign import run_campaign
from cluster.cli import main
from cluster.plan import read_plan
from tests.cluster.campaigns import make_running, part

FAKE = ["--model", "some-model", "--traffic", "chat", "--engine", "fake", "--no-ray", "--budget", "40s"]


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("campaigns") / "done"
    run_campaign(make_running(folder))
    return folder


@pytest.fixture
def finished(made_once: Path, tmp_path: Path) -> Path:
    """A finished campaign that the test may write to."""
    return Path(shutil.copytree(made_once, tmp_path / "done"))


def last_line(text: str) -> dict[str, object]:
    return json.loads(text.strip().splitlines()[-1])  # type: ignore[no-any-return]


def test_compile_ends_with_one_json_line_and_says_the_rest_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *FAKE, "--out", str(tmp_path / "c")]) == 0
    out, err = capsys.readouterr()
    assert len(out.strip().splitlines()) == 1
    assert last_line(out) == json.loads((tmp_path / "c" / "result.json").read_text())
    assert "verdict" in err
    assert (tmp_path / "c" / "report.html").is_file()


def test_quiet_says_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", *FAKE, "--max-attempts", "2", "--out", str(tmp_path / "c"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compile", "--traffic", "chat"], "model '' is missing; give --model, or model in the campaign file"),
        (["compile", *FAKE, "--numerics", "tolerence"], "numerics 'tolerence' is not known; did you mean 'tolerance'?"),
        (["compile", *FAKE, "--budget", "soon"], "budget 'soon' is not a duration; write it as 90s, 5m, 1h or 1h30m"),
        (["compile", *FAKE, "--concurrency", "0"], "concurrency '0' is below 1"),
        (["compile", *FAKE, "--enginee", "x"], "is not understood: unrecognized arguments: --enginee x"),
        (["compile", "--resume", "/nowhere"], "campaign '/nowhere' has no campaign.json"),
        (["compile", "--resume", "/nowhere", "--budget", "5m"], "--budget '5m' cannot be given with --resume"),
        (["try", "--set", "threadz=2", *FAKE[:-2]], "setting 'threadz' is not known; did you mean 'threads'?"),
        (["try", "--set", "threads", *FAKE[:-2]], "--set 'threads' is not of the form K=V"),
        (["try", *FAKE[:-2]], "try '' has nothing to try"),
        (["try", "--set", "threads=99", *FAKE[:-2]], "setting threads '99' is more than the "),
        (["compile", *FAKE[:6], "--address", "127.0.0.1:1"], "--address '127.0.0.1:1' cannot be reached: "),
        (["compile", *FAKE, "--tracking-uri", "http://127.0.0.1:1"], "--tracking-uri 'http://127.0.0.1:1' does not answer"),
        (["try", "/nowhere.py", *FAKE[:-2]], "part '/nowhere.py' does not exist"),
        (["status", "/nowhere"], "campaign '/nowhere' has no campaign.json"),
        (["traffic", "chat", "--format", "azure"], "traffic format 'azure' is for files, and chat is a preset; leave it out"),
        (["hardware", "h20"], "hardware 'h20' is not a known system; did you mean 'h200'? known: a100,"),
        (["nonsense"], "command line 'nonsense' is not understood: argument COMMAND: invalid choice: 'nonsense'"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_sentence_and_exit_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = [line for line in err.splitlines() if line.startswith("hotpass: ")]
    assert len(last) == 1
    assert said in last[0]
    assert not list(tmp_path.iterdir()), "what could never begin leaves nothing behind"


def test_a_campaign_file_gives_what_options_leave_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'model = "some-model"\ntraffic = "code"\nengine = "fake"\nray = false\nbudget = "40s"\nmax_attempts = 1\n'
    )
    assert main(["compile", "--campaign", str(file), "--traffic", "chat", "--out", str(tmp_path / "c"), "--quiet"]) == 0
    spec = read_plan(tmp_path / "c").spec
    assert (spec.model, spec.traffic, spec.max_attempts) == ("some-model", "chat", 1)


def test_an_existing_campaign_is_not_overwritten(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", *FAKE, "--out", str(finished)]) == 2
    assert "holds a campaign already; resume it with --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "child", "code", "verdict"),
    [("crash-mlp", "mlp", 1, "failed"), ("nothing", "mlp", 3, "inconclusive")],
)
def test_try_exits_by_verdict(
    name: str, child: str, code: int, verdict: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / f"{name}.py"
    source.write_text(part(name, child).text())
    # The fake of the command line times by content; a fake that times by name is what the campaign here was made with.
    from cluster.trying import find_candidate, make_wanted, try_candidate

    running = make_running(finished)
    tried = try_candidate(running, make_wanted(str(source), [], [], "float32"), find_candidate(finished, None))
    assert (tried.exit_code, tried.verdict) == (code, verdict)


def test_try_of_a_faster_part_goes_through_the_gates_and_is_recorded(finished: Path, tmp_path: Path) -> None:
    from cluster.journal import read_state
    from cluster.trying import find_candidate, make_wanted, try_candidate

    before = len(read_state(finished).attempts)
    source = tmp_path / "quick-mlp.py"
    source.write_text(part("quick-mlp", "mlp").text())
    wanted = make_wanted(str(source), [], [], "float32")
    tried = try_candidate(make_running(finished), wanted, find_candidate(finished, "loaded"))
    assert tried.exit_code == 0
    assert set(tried.gates.values()) == {"pass"}
    assert tried.attempts[-1].purpose == "cold"
    after = read_state(finished)
    assert len(after.attempts) == before + 3  # A/A of the new session, fast, cold
    assert after.result is not None


def test_try_on_the_command_line_prints_its_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["try", "--set", "threads=2", "--in", str(finished), "--quiet"])
    line = last_line(capsys.readouterr().out)
    assert {"faster": 0, "slower": 1, "inconclusive": 3}[str(line["verdict"])] == code
    assert line["label"] == "threads=2"
    assert line["campaign"] == "done"


def test_candidates_and_their_diff(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["candidates", str(finished), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    winner = next(row for row in rows if row["winner"])
    assert rows[0]["id"] == winner["id"]
    assert main(["candidates", str(finished), "--diff", "loaded", winner["id"][:12]]) == 0
    out = capsys.readouterr().out
    assert "+part quick-mlp" in out
    assert main(["candidates", str(finished), "--diff", "loaded", "zzz"]) == 2
    assert "begins the id of no candidate here" in capsys.readouterr().err


def test_status_of_a_finished_campaign(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(finished), "--json"]) == 0
    line = last_line(capsys.readouterr().out)
    assert line["status"] == "done"
    assert line["attempts"] == recorded_attempts(finished)


def recorded_attempts(folder: Path) -> int:
    return int(json.loads((folder / "result.json").read_text())["attempts"])


def test_continue_starts_from_the_winner_and_says_how_far_the_traffic_moved(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--traffic", "code", "--engine", "fake", "--no-ray", "--budget", "40s", "--max-attempts", "1"]
    assert main(["compile", "--continue", str(finished), *options, "--out", str(tmp_path / "again")]) == 0
    out, err = capsys.readouterr()
    line = last_line(out)
    assert 0 < line["continued"]["shape_distance"] <= 1  # type: ignore[index]
    assert "the shape tables of by-hand and code are" in err
    winner = json.loads((finished / "result.json").read_text())["best"]["candidate"]
    from cluster.journal import read_state

    state = read_state(tmp_path / "again")
    first = next(row for row in state.attempts if row.attempt.purpose == "search")
    assert first.attempt.candidate_id == winner
    assert state.candidates[winner].proposer == "continued"


def test_help_is_quick_and_complete() -> None:
    done = subprocess.run([sys.executable, "-m", "cluster.cli", "--help"], capture_output=True, text=True, check=True)
    for command in (
        "compile",
        "try",
        "init-part",
        "slots",
        "traffic",
        "hardware",
        "ui",
        "report",
        "candidates",
        "status",
    ):
        assert command in done.stdout


def test_output_that_nobody_reads_to_the_end_is_no_error(finished: Path) -> None:
    command = f"{sys.executable} -m cluster.cli candidates {finished} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_best_is_taken_apart(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["candidates", str(finished), "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    best = next(row for row in rows.values() if row["winner"])
    effects = {effect["thing"]: effect["value"] for effect in best["effects"]}
    assert set(effects) >= {"quick-mlp", "quick-attention"}
    assert effects["quick-mlp"] == pytest.approx(1 / 0.7, rel=0.1)
    assert effects["quick-attention"] == pytest.approx(1 / 0.8, rel=0.1)
    assert main(["candidates", str(finished)]) == 0
    assert "what bought how much of the best" in capsys.readouterr().out
