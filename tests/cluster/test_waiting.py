"""What people read while an engine waits for the measuring lease of another campaign."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.lease import MeasuringLease
from cluster.campaign import run_campaign
from cluster.ports import Silent
from cluster.waiting import Waits
from tests.cluster.campaigns import make_running


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def activity(self, engine: str, text: str) -> None:
        self.lines.append((engine, text))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTPASS_LEASE_DIR", str(tmp_path / "leases"))


def test_the_view_says_whose_lease_an_engine_waits_for_and_then_what_it_does() -> None:
    said = Said()
    view = Waits(said, "cpu", "campaigns/mine", ["decoder-0"])
    view.activity("decoder-0", "loading the model")
    view.look()
    assert said.lines == [("decoder-0", "loading the model")]
    with MeasuringLease("cpu", holder="decoder-0 of campaigns/other"):
        view.look()
        view.look()
        assert len(said.lines) == 2
        engine, text = said.lines[-1]
        assert engine == "decoder-0"
        assert text.startswith("waiting for the measuring lease, which process ")
        assert text.endswith(" (decoder-0 of campaigns/other) holds")
        view.activity("builder", "cpp-model")
        assert said.lines[-1] == ("builder", "cpp-model"), "a builder takes no lease"
    view.look()
    assert said.lines[-1] == ("decoder-0", "loading the model")


def test_an_engine_that_holds_the_lease_itself_or_is_idle_waits_for_nobody() -> None:
    said = Said()
    view = Waits(said, "cpu", "campaigns/mine", ["decoder-0", "decoder-1"])
    view.activity("decoder-0", "search · fast · x")
    with MeasuringLease("cpu", holder="decoder-1 of campaigns/mine"):
        view.look()
    assert said.lines == [("decoder-0", "search · fast · x")]
    view.activity("decoder-0", "")
    with MeasuringLease("cpu", holder="decoder-0 of campaigns/other"):
        view.look()
    assert said.lines == [("decoder-0", "search · fast · x"), ("decoder-0", "")]


def test_a_campaign_shows_what_its_engines_do_through_it(tmp_path: Path) -> None:
    running = make_running(tmp_path / "c", max_attempts=1)
    running.view = said = Said()
    run_campaign(running)
    assert ("fake-0", "loading the model") in said.lines
