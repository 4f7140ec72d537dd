"""What people watch: the status line, the panel, and views that keep quiet when they should."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cluster.campaign import run_campaign
from cluster.journal import read_state
from cluster.live import LineView, TerminalView, clock_text, panel, span, status_line
from cluster.state import CampaignState
from hotpass.records.measurement import Estimate
from tests.cluster.campaigns import make_plan, make_running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live") / "c"
    run_campaign(make_running(folder, max_attempts=8))
    return folder


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65.4, "1:05"), (3600, "1:00:00"), (-3, "0:00")])
def test_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_a_number_that_was_not_measured_says_so() -> None:
    estimate = Estimate(value=1.5, low=1.4, high=1.6)
    assert span(estimate) == "1.50 × [1.40, 1.60]"
    assert span(Estimate(value=1.5, low=1.4, high=1.6, kind="simulated")).endswith("simulated")
    assert span(Estimate(value=1.5, low=0.0, high=5e21)) == "1.50 × [0.00, ∞]"
    assert span(None) == "-"


def test_the_status_line_names_the_leader_and_what_was_rejected(folder: Path) -> None:
    plan, state = make_plan(folder), read_state(folder)
    line = status_line(state, plan)
    assert f"{len(state.search_attempts())} attempts" in line
    assert "best 1.7" in line or "best 1.8" in line
    assert f"{state.rejected()['failed']} failed" in line


def test_the_panel_shows_engines_leader_and_recent_attempts(folder: Path) -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=110)
    console.print(panel(read_state(folder), make_plan(folder), {"fake-0": ("search · fast · x", 10.0)}, now=13.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "fake-0" in text
    assert "search · fast · x" in text
    assert "3 s" in text
    assert "▲ faster" in text
    assert "cold" in text


def test_an_empty_campaign_has_a_panel_too(tmp_path: Path) -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=80)
    console.print(panel(CampaignState(), make_plan(tmp_path / "c"), {}, now=0.0))
    assert "nothing faster than as loaded yet" in console.file.getvalue()  # type: ignore[attr-defined]


def test_lines_come_for_news_only(folder: Path) -> None:
    stream = io.StringIO()
    view = LineView(make_plan(folder), stream)
    state = read_state(folder)
    view.changed(state)
    view.changed(state)
    view.activity("fake-0", "search · fast · x")
    view.activity("fake-0", "loading the model")
    view.note("attention")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("hotpass · ")
    assert lines[1:] == ["hotpass · fake-0: loading the model", "hotpass · attention"]


def test_the_terminal_view_opens_and_closes(folder: Path) -> None:
    view = TerminalView(make_plan(folder), io.StringIO())
    view.changed(read_state(folder))
    view.activity("fake-0", "x")
    view.render()
    view.close()
