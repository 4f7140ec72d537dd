"""The desk and the board: every tool answers from what the campaign recorded, and refuses what is not a proposer's to do."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from cluster.campaign import run_campaign
from cluster.cli import main
from cluster.desk import CampaignDesk
from cluster.journal import read_state
from cluster.report import write_report
from hotpass.canonical import Json
from hotpass.errors import InputError
from search.agents.tools import TOOLS, call_tool
from tests.cluster.campaigns import PARTS, make_running, part

AUTHOR = "agent:mlp"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished campaign."""
    folder = tmp_path_factory.mktemp("desk") / "done"
    run_campaign(make_running(folder))
    return folder


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A campaign that was stopped in the middle of its search: it still takes proposals."""
    running = make_running(tmp_path / "c", max_attempts=3)
    run_campaign(running)
    events = tmp_path / "c" / "events" / "000001.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    end = next(index for index, line in enumerate(lines) if '"decision":"stop"' in line)
    events.write_text("".join(lines[:end]))
    return tmp_path / "c"


def desk(folder: Path) -> CampaignDesk:
    return CampaignDesk(folder, catalogue=lambda device: PARTS, lease=lambda domain: nullcontext())


def ask(folder_or_desk: Path | CampaignDesk, tool: str, **arguments: object) -> Json:
    here = desk(folder_or_desk) if isinstance(folder_or_desk, Path) else folder_or_desk
    answer = call_tool(here, AUTHOR, tool, arguments)
    json.dumps(answer, allow_nan=False)
    return answer


def test_reading_tools_say_what_the_ledger_says(done: Path) -> None:
    state = read_state(done)
    deployment = ask(done, "deployment")
    assert (deployment["device"], deployment["numerics_policy"]) == ("cpu", "tolerance: wider classes are refused")
    slots = {row["claim"]: row for row in ask(done, "slots")["slots"]}
    assert (slots["model.layers.*.mlp"]["class"], slots["model.layers.*.mlp"]["slots"]) == ("LlamaMLP", 2)
    parts = {row["part"]: row for row in ask(done, "catalogue")["parts"]}
    assert parts["quick-mlp"]["applies"] == "yes"
    assert "class Part" in ask(done, "catalogue", part="quick-mlp")["text"]
    best = ask(done, "candidates", limit=1)["candidates"][0]
    assert (best["verdict"], best["is_incumbent"]) == ("faster", True)
    assert best["speedup_over_loaded"]["kind"] == "simulated"
    failed = ask(done, "candidates", verdict="failed")
    assert failed["of"] == state.rejected()["failed"]
    assert "SIGSEGV" in failed["candidates"][0]["reason"]
    shown = ask(done, "candidate", candidate="incumbent")
    assert shown["candidate"] == state.incumbent_id
    numbers = [a["number"] for a in shown["attempts"]]
    assert numbers == [row.seq for row in state.attempts_of(state.incumbent_id)]
    rows = ask(done, "shapes")["rows"]
    assert sum(row["share_of_steps"] for row in rows) == pytest.approx(1.0)
    assert all(row["incumbent_ms"] < row["loaded_ms"] for row in rows)
    profile = ask(done, "profile")
    assert sum(row["share_of_time"] for row in profile["rows"]) == pytest.approx(1.0, abs=1e-3)


def test_a_finished_campaign_takes_no_proposal(done: Path) -> None:
    with pytest.raises(InputError, match="its search has ended"):
        ask(done, "submit_proposal", request_id="r", hypothesis="h", parts=[{"name": "quick-mlp"}])


def test_a_submission_is_queued_measured_later_and_known_to_others(stopped: Path) -> None:
    here = desk(stopped)
    text = part("brand-new", "post_attention_layernorm").text()
    submitted = {"hypothesis": "fewer calls", "parts": [{"name": "brand-new", "source": text}], "onto": "loaded"}
    first = ask(here, "submit_proposal", request_id="r1", **submitted)
    assert first["standing"] == "queued"
    assert "once it is resumed" in first["note"]
    assert ask(here, "result", request_id="r1")["standing"] == "queued"
    assert ask(stopped, "submit_proposal", request_id="other", **submitted)["standing"] == "known"
    tried = next(i for i in read_state(stopped).candidates.values() if i.parts and not i.settings)
    again = ask(
        here, "submit_proposal", request_id="r2", hypothesis="h", onto="loaded", parts=[{"name": tried.parts[0]}]
    )
    assert again["standing"] == "known"
    assert again["result"]["attempts"][0]["verdict"] in ("faster", "slower", "failed")


@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("release", {}, "does not exist"),
        ("export", {}, "does not exist"),
        ("set_policy", {"numerics": "lossy"}, "does not exist"),
        ("traffic", {}, "does not exist"),
        ("candidate", {"candidate": "nil"}, "is no candidate"),
        ("slot_source", {"slot": "model.layers.*.mpl"}, "did you mean"),
        ("post", {"kind": "finding", "text": "x", "evidence": [1]}, "is no attempt"),
        ("result", {}, "needs one of"),
        ("result", {"request_id": "nil"}, "ask with the candidate"),
        ("submit_proposal", {"request_id": "r", "hypothesis": "h"}, "changes nothing"),
        ("submit_proposal", {"request_id": "r", "hypothesis": "h", "settings": {"numerics": "lossy"}}, "is not known"),
        ("submit_proposal", {"request_id": "r", "hypothesis": "h", "policy": "lossy"}, "policy"),
        ("quick_check", {"part": {"name": "x", "source": "import os"}}, "0 classes with @part"),
        ("quick_check", {"part": {"name": "x", "source": "s", "files": {"../x": ""}}}, "no plain name"),
    ],
)
def test_what_a_proposer_may_not_is_refused(stopped: Path, tool: str, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ask(stopped, tool, **arguments)


def test_the_tools_are_these_and_no_others() -> None:
    assert {tool.name for tool in TOOLS} == {
        "deployment", "read_board", "post", "slots", "slot_source", "catalogue", "candidates", "candidate", "shapes", "profile", "quick_check",
        "submit_proposal", "result",
    }  # fmt: skip
    for tool in TOOLS:
        assert tool.schema["type"] == "object"
        assert "$ref" not in json.dumps(tool.schema)


def test_people_post_to_the_board_and_everybody_sees_what_the_ledger_says_of_it(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = next(row for row in read_state(stopped).search_attempts() if row.speedup_vs_loaded)
    about = ["--candidate", row.attempt.candidate_id[:8], "--evidence", str(row.seq)]
    assert main(["board", str(stopped), "--post", "<b>halves</b> the time", "--kind", "finding", *about]) == 0
    assert main(["board", str(stopped)]) == 0
    shown = capsys.readouterr().out
    assert "FINDING  person" in shown
    assert f"[{row.seq}] {row.attempt.candidate_id[:10]} {row.attempt.verdict}" in shown
    assert main(["tool", str(stopped), "read_board", '{"kind": "warning"}']) == 0
    assert json.loads(capsys.readouterr().out) == {"posts": [], "more": False}
    page = write_report(stopped).read_text()
    assert "Message board" in page
    assert "&lt;b&gt;halves&lt;/b&gt; the time" in page
    assert main(["board", str(stopped), "--post", "x", "--kind", "rumour"]) == 2
