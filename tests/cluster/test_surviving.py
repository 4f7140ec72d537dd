"""Plans of parallelism beside settings: which survive where, and that the search composes one with a part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.campaign import run_campaign
from cluster.events import read_events
from cluster.journal import FOLDER, read_state
from cluster.plan import read_plan
from cluster.replay import replay
from cluster.spec import CampaignSpec
from cluster.store import load_candidates
from cluster.surviving import surviving_plans
from engines.fake import FakeEngine
from engines.prepare.tiny import make_tiny_model
from hotpass.records.candidate import Candidate, Numerics, Reload
from hotpass.records.deployment import HardwareRef
from hotpass.records.shapes import ShapeRow
from search.proposers import neighbours, screening
from search.scheduler import reload_of
from search.space import PLAN, Space
from tests.cluster.campaigns import PARTS, make_running
from tests.search.builders import deployment, part, slot_table

PLANS = ({}, {"tp": 2}, {"tp": 4})


def space(plans: tuple[dict[str, int], ...] = PLANS, allowed: Numerics = Numerics.TOLERANCE) -> Space:
    parts = [part("a", ["model.layers.*.mlp"])]
    return Space.build(
        deployment(cores=1), slot_table(), parts, plans=plans, allowed=allowed, applies=lambda source: None
    )


def test_a_plan_is_a_choice_beside_the_others_where_there_is_more_than_one() -> None:
    wide, narrow = space(), space(({},))
    assert narrow.left_out[PLAN] == "one plan survives on this deployment"
    assert wide.version != narrow.version
    assert wide.size().candidates == 3 * narrow.size().candidates
    made = wide.to_candidate({PLAN: '{"tp":2}'})
    assert (made.parallelism, made.numerics, made.label) == ({"tp": 2}, Numerics.TOLERANCE, "tp2")
    assert wide.choices_of(made) is not None
    assert narrow.choices_of(made) is None
    assert wide.choices_of(Candidate(parallelism={"tp": 8}, numerics=Numerics.TOLERANCE)) is None
    assert reload_of(made) is Reload.RESHARD


def test_each_plan_is_screened_and_is_one_change_away_and_a_policy_of_equal_bits_has_none() -> None:
    tried = [space().to_candidate(step.choices).parallelism for step in screening(space(), Candidate())]
    assert [plan for plan in tried if plan] == [{"tp": 2}, {"tp": 4}]
    two = Candidate(parallelism={"tp": 2}, numerics=Numerics.TOLERANCE)
    near = [space().to_candidate(step.choices) for step in neighbours(space(), two)]
    assert {"tp": 4} in [candidate.parallelism for candidate in near]
    with_part = [candidate for candidate in near if candidate.parts]
    assert {tuple(candidate.parallelism.items()) for candidate in with_part} == {(("tp", 2),)}
    same = space(allowed=Numerics.BIT_IDENTICAL)
    assert all(not same.to_candidate(step.choices).parallelism for step in screening(same, Candidate()))


def step_ms(candidate: Candidate, row: ShapeRow) -> float:
    time = 20.0 / candidate.parallelism.get("tp", 1) ** 0.5
    for use in candidate.parts:
        time *= {"quick-mlp": 0.7, "slow-norm": 1.2}.get(use.source.name, 1.0)
    return time


def test_a_search_composes_a_plan_with_a_part_into_the_winner(tmp_path: Path) -> None:
    """Simulated: no engine here runs more than one rank."""
    folder = tmp_path / "c"
    running = make_running(
        folder,
        engine=lambda: FakeEngine("fake-0", step_time=step_ms, logit_error=lambda c: 0.0 if c == Candidate() else 1e-5),
        max_attempts=25,
        baselines=False,
    )
    running.plan = replace(running.plan, plans=PLANS)
    result = run_campaign(running)
    assert result["best"]["label"].endswith("tp4")
    assert "quick-mlp" in result["best"]["label"]
    winner = load_candidates(folder)[result["best"]["candidate"]]
    assert winner.parallelism == {"tp": 4}
    assert read_plan(folder).plans == PLANS
    told = [e.payload["parallelism"] for e in read_events(folder / FOLDER) if "parallelism" in e.payload]
    assert {"tp": 2} in told
    assert read_state(folder).stop_reason
    assert replay(folder, PARTS).differing == ()


def gpus(count: int) -> HardwareRef:
    return HardwareRef(
        name="h200", device="cuda", num_devices=count, isa=(), last_level_cache_bytes=50 << 20, memory_bytes=141 << 30
    )


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> CampaignSpec:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"), heads=8, kv_heads=8)
    return CampaignSpec(model=str(model), traffic="64x64", engine="decoder", concurrency=4)


def test_one_plan_survives_on_a_single_device(spec: CampaignSpec) -> None:
    cpu = deployment().hardware
    assert surviving_plans(spec, cpu) == surviving_plans(spec, gpus(1)) == (({},), ())


def test_an_engine_of_one_rank_leaves_one_plan_and_says_what_it_leaves_out(spec: CampaignSpec) -> None:
    plans, notes = surviving_plans(spec, gpus(4))
    assert plans == ({},)
    assert len(notes) == 1
    assert "which the decoder engine cannot run" in notes[0]


def test_an_engine_of_any_rank_keeps_what_the_cost_model_kept_as_loaded_first(spec: CampaignSpec) -> None:
    plans, notes = surviving_plans(replace(spec, engine="fake"), gpus(4))
    assert plans[0] == {}
    assert {"tp": 2} in plans
    assert {"tp": 4} in plans
    assert len({tuple(plan.items()) for plan in plans}) == len(plans) <= 8
    assert notes == ()


def test_a_model_that_nobody_can_price_costs_the_choice_and_not_the_campaign(spec: CampaignSpec) -> None:
    plans, notes = surviving_plans(replace(spec, model="no-such-model", engine="fake"), gpus(4))
    assert plans == ({},)
    assert notes[0].startswith("plans of parallelism are not searched over: ")
