"""What the desk answers of a module: sources of its slots, and the quick check of a part in it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from actors.slots import open_program
from cluster.briefing import write_briefing
from cluster.desk import CampaignDesk
from cluster.events import EventLog
from cluster.journal import FOLDER
from cluster.plan import write_plan
from engines.module.prepare import prepare_module
from search.agents.tools import call_tool
from tests.cluster.campaigns import make_plan
from tests.engines.module.conftest import RECIPE, deployment_of, part


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> CampaignDesk:
    """Of a campaign of the module engine whose engine was loaded, and that has measured nothing."""
    made = tmp_path_factory.mktemp("module")
    (made / "net.py").write_text(RECIPE)
    model = prepare_module(str(made / "net.py"), cache_dir=made / "cache")
    plan = make_plan(made / "c", engine="module", traffic="examples", numerics="tolerance")
    write_plan(made / "c", replace(plan, deployment=deployment_of(model)))
    write_briefing(made / "c", open_program(model).slots(), compiler=False)
    EventLog.open(made / "c" / FOLDER).close()
    return CampaignDesk(made / "c", lease=lambda domain: nullcontext())


def test_a_template_of_a_modules_slot_passes_the_quick_check(desk: CampaignDesk) -> None:
    shown = call_tool(desk, "agent:mlp", "slot_source", {"slot": "blocks.1"})
    assert shown["claim"] == "blocks.*"
    checked = call_tool(desk, "agent:mlp", "quick_check", {"part": {"name": "start", "source": shown["text"]}})
    assert (checked["looks"], checked["problem"]) == ("right", "")
    assert [row["calls"] > 0 for row in checked["rows"]] == [True, True], "both examples"
    assert [row["max_abs"] for row in checked["rows"]] == [row["loaded_max_abs"] for row in checked["rows"]]
    reference = call_tool(desk, "agent:mlp", "slot_source", {"slot": "blocks.*", "what": "reference"})
    assert "class Block" in reference["text"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return self.reference(*args, **kwargs) * 1.5", "wrong on "),
        ("raise ValueError('no')", "exception: the forward fails: ValueError: no"),
    ],
)
def test_a_part_that_is_wrong_in_a_module_is_told_so(desk: CampaignDesk, body: str, problem: str) -> None:
    source = part(body, claims='["blocks.*"]', replaces="Block")
    checked = call_tool(desk, "agent:mlp", "quick_check", {"part": {"name": "planted", "source": source.text()}})
    assert checked["looks"] == "wrong"
    assert checked["problem"].startswith(problem)
