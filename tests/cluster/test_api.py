"""The Python API: a campaign read while it runs and after, a part tried by hand."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import hotpass as hp
from cluster.api import Campaign
from cluster.campaign import run_campaign
from cluster.ports import LocalEngine
from tests.cluster.campaigns import fake, machines_with, make_running


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    folder = tmp_path_factory.mktemp("api") / "c"
    run_campaign(make_running(folder))
    return hp.open_campaign(folder)


def test_best_is_the_cold_claim(done: Campaign) -> None:
    best = done.best
    assert best is not None
    assert done.status == "done"
    assert best.purpose is hp.Purpose.COLD
    assert best.speedup_vs_loaded.value == pytest.approx(1 / 0.56, rel=0.03)
    assert best.speedup_vs_loaded.kind == "simulated"
    assert set(best.gates.values()) == {"pass"}


def test_attempts_are_a_table_of_every_attempt(done: Campaign) -> None:
    table = done.attempts()
    assert len(table) == len(done.state.attempts)
    assert (table["purpose"] == "aa").sum() == 1
    crashed = table[table["verdict"] == "failed"]
    assert crashed["speedup_vs_loaded"].isna().all()
    assert crashed["reason"].str.contains("SIGSEGV").all()
    cold = table[table["purpose"] == "cold"]
    assert (cold["low"] < cold["speedup_vs_loaded"]).all()
    assert table["elapsed_seconds"].is_monotonic_increasing


def test_plot_and_report_are_written(done: Campaign, tmp_path: Path) -> None:
    figure = done.plot(tmp_path / "progress.png")
    assert (tmp_path / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert figure.axes[0].get_ylabel() == "× as loaded (simulated)"
    assert done.report() == done.folder / "report.html"


def test_html_escapes_what_people_named(done: Campaign) -> None:
    assert "<th" in done._repr_html_()
    assert "simulated" in done._repr_html_()


def test_a_running_campaign_can_be_read(tmp_path: Path) -> None:
    """The engine waits at its sixth order until this test has looked."""
    arrived, go_on = threading.Event(), threading.Event()

    class Waits(LocalEngine):
        left = 6

        def submit(self, assignment):  # type: ignore[no-untyped-def]
            self.left -= 1
            if not self.left:
                arrived.set()
                assert go_on.wait(60)
            return super().submit(assignment)

    running = make_running(tmp_path / "c", max_attempts=8)
    running.open_machines = machines_with(fake, lambda port: Waits(port.server))
    worker = threading.Thread(target=run_campaign, args=(running,))
    worker.start()
    assert arrived.wait(60)
    campaign = hp.open_campaign(tmp_path / "c")
    seen = campaign.status, len(campaign.attempts()), campaign.result
    go_on.set()
    worker.join()
    assert seen == ("running", 5, None)
    assert campaign.status == "done"
    assert len(campaign.attempts()) > 5


def test_a_background_campaign_stops_and_resumes(tmp_path: Path) -> None:
    spec = {"engine": "fake", "ray": False, "out": str(tmp_path / "c"), "max_attempts": 2, "baselines": False}
    campaign = hp.compile("some-model", "chat", "40s", background=True, **spec)
    campaign.stop()
    assert campaign.status in ("stopped", "done")
    again = hp.compile(resume=tmp_path / "c", quiet=True)
    assert again.status == "done"
    assert again.result == campaign.result


def test_a_background_campaign_raises_when_it_is_waited_for(tmp_path: Path) -> None:
    from cluster.events import EventLog

    with EventLog.open(tmp_path / "c" / "events"):  # somebody else writes this folder
        campaign = hp.compile("some-model", "chat", engine="fake", ray=False, out=str(tmp_path / "c"), background=True)
        with pytest.raises(hp.InputError, match="already written by this process"):
            campaign.wait()


def test_wrong_arguments_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(hp.InputError, match="traffic '' is missing"):
        hp.compile("some-model")
    with pytest.raises(hp.InputError, match=r"has no campaign\.json"):
        hp.open_campaign(tmp_path)
    with pytest.raises(hp.InputError, match="is not a field of a campaign"):
        hp.compile("some-model", "chat", budgets="5m")
