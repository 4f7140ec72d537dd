"""What the desk answers of a real model: sources of its slots, and the quick check, under the measuring lease."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.briefing import write_briefing
from cluster.desk import CampaignDesk
from cluster.events import EventLog
from cluster.journal import FOLDER
from cluster.plan import write_plan
from engines.fake import FakeEngine
from engines.prepare import prepare_model
from engines.prepare.tiny import make_tiny_model
from hotpass.errors import MachineError
from search.agents.tools import call_tool
from tests.cluster.campaigns import make_plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A campaign of the decoder engine whose engine was loaded, and that has measured nothing."""
    model = prepare_model(str(make_tiny_model(tmp_path / "tiny", layers=2)), cache_dir=tmp_path / "cache")
    plan = make_plan(tmp_path / "c", engine="decoder")
    write_plan(tmp_path / "c", replace(plan, deployment=replace(plan.deployment, model=model)))
    write_briefing(tmp_path / "c", FakeEngine().slots(), compiler=False)
    EventLog.open(tmp_path / "c" / FOLDER).close()
    return tmp_path / "c"


def test_a_template_from_the_slot_table_passes_the_quick_check_under_the_lease(folder: Path) -> None:
    held: list[str] = []

    @contextmanager
    def lease(domain: str) -> Iterator[None]:
        held.append(domain)
        yield

    desk = CampaignDesk(folder, lease=lease)
    shown = call_tool(desk, "agent:mlp", "slot_source", {"slot": "model.layers.1.mlp"})
    assert shown["claim"] == "model.layers.*.mlp"
    assert "class Start" in shown["text"]
    reference = call_tool(desk, "agent:mlp", "slot_source", {"slot": "model.layers.*.mlp", "what": "reference"})
    assert "class LlamaMLP" in reference["text"]
    assert held == ["cpu"]  # made once, kept in the folder
    checked = call_tool(desk, "agent:mlp", "quick_check", {"part": {"name": "start", "source": shown["text"]}})
    assert (checked["looks"], checked["problem"]) == ("right", "")
    assert all(row["calls"] > 0 for row in checked["rows"])
    assert held == ["cpu", "cpu"]


def test_a_quick_check_beside_a_busy_engine_says_so(folder: Path) -> None:
    @contextmanager
    def busy(domain: str) -> Iterator[None]:
        raise MachineError("held")
        yield

    text = (
        "from hotpass import part\n@part(engine='decoder', claims=['model.layers.*.mlp'])\n"
        "class P:\n    def forward(self, x):\n        return x\n"
    )
    desk = CampaignDesk(folder, lease=busy)
    answer = call_tool(desk, "agent:mlp", "quick_check", {"part": {"name": "p", "source": text}})
    assert "engines are measuring" in answer["note"]
