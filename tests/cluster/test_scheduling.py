"""The loop with several engines, late answers, lost machines, agents' parts and a control, on the fake engine."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.builder import BuilderServer
from actors.engine import EngineServer, Measured
from cluster.campaign import Running, run_campaign
from cluster.events import read_events
from cluster.journal import FOLDER, read_state
from cluster.machines import Machines, MachinesOpener, engine_spec
from cluster.pending import Answers
from cluster.plan import Plan
from cluster.ports import LocalBuilder, LocalEngine, View
from cluster.replay import replay
from cluster.rules import LEAST_TAU, needs_wider_cut, tau_between_tiers
from cluster.state import CampaignState
from engines.fake import FakeEngine, step_time_from_costs
from hotpass.errors import EngineDied, MachineError
from hotpass.records.candidate import Candidate, Numerics, PartUse, Proposal
from hotpass.records.measurement import Assignment, MeasureResult, Purpose, Tier, Verdict
from search.inbox import Inbox
from tests.cluster.campaigns import FACTORS, PARTS, fake, make_running, part


def opened_with(
    num_engines: int = 1,
    engine: Callable[[EngineServer], LocalEngine] = LocalEngine,
    builder: Callable[[BuilderServer], LocalBuilder] = LocalBuilder,
    factors: dict[str, float] | None = None,
    build_ahead: bool = False,
) -> MachinesOpener:
    @contextlib.contextmanager
    def opened(plan: Plan, view: View) -> Iterator[Machines]:
        servers = [
            EngineServer(replace(engine_spec(plan), name=f"fake-{index}"), lambda spec, _: fake(factors or FACTORS))
            for index in range(num_engines)
        ]
        made = builder(BuilderServer(servers[0].spec, plan.deployment, 10.0))
        engines = [engine(server) for server in servers]
        yield Machines(engines=engines, builder=made, build_ahead=build_ahead, compiler=True)

    return opened


def campaign(folder: Path, machines: MachinesOpener | None = None, **changes: object) -> Running:
    running = make_running(folder, **changes)  # type: ignore[arg-type]
    running.open_machines = machines or opened_with()
    return running


def decisions(folder: Path, name: str) -> list[dict[str, Any]]:
    return [e.payload for e in read_events(folder / FOLDER) if e.kind == "decision" and e.payload["decision"] == name]


@pytest.mark.parametrize("build_ahead", [False, True])
def test_several_engines_measure_distinct_candidates(tmp_path: Path, build_ahead: bool) -> None:
    folder = tmp_path / "c"
    run_campaign(campaign(folder, opened_with(3, build_ahead=build_ahead), max_attempts=20))
    state = read_state(folder)
    orders = [e.payload for e in read_events(folder / FOLDER) if e.kind == "assignment"]
    assert {order["engine"] for order in orders} == {"fake-0", "fake-1", "fake-2"}
    keys = Counter(
        (row.attempt.candidate_id, row.attempt.tier) for row in state.attempts if row.attempt.purpose == "search"
    )
    assert set(keys.values()) == {1}


def test_turns_name_who_had_something_and_every_proposal_has_one(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    run_campaign(campaign(folder, max_attempts=12))
    turns = {turn["turn"]: turn for turn in decisions(folder, "turn")}
    asked = [e.payload for e in read_events(folder / FOLDER) if e.kind == "proposal"]
    assert all(turns[proposal["turn"]]["arm"] in turns[proposal["turn"]]["arms"] for proposal in asked)
    assert {turn["arm"] for turn in turns.values()} >= {"screening", "neighbour"}


class Loses(LocalEngine):
    """Dies under every candidate with a certain part, and under nothing else."""

    def submit(self, assignment: Assignment) -> Future[Measured]:
        if any(use.source.name == "slow-norm" for use in assignment.candidate.parts):
            future: Future[Measured] = Future()
            future.set_exception(EngineDied("the machine under it is gone"))
            return future
        return super().submit(assignment)


def test_a_candidate_that_loses_engine_after_engine_is_what_failed_and_counts_once(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    result = run_campaign(campaign(folder, opened_with(2, Loses), max_attempts=15))
    state = read_state(folder)
    lost = [row.attempt for row in state.attempts if "slow-norm" in state.label_of(row.attempt.candidate_id)]
    assert lost
    assert {attempt.verdict for attempt in lost} == {Verdict.FAILED}
    assert max(Counter(attempt.candidate_id for attempt in lost).values()) == 1
    assert lost[0].reason.startswith("2 engines were lost while they measured it")
    assert result["verdict"] == "faster"
    leases = [e.payload for e in read_events(folder / FOLDER) if e.kind == "lease" and e.payload["state"] == "lost"]
    assert len(leases) == 2 * len(lost)


class Silent(LocalEngine):
    """Keeps the third order's answer back until the test asks for it."""

    kept: Future[Measured] | None = None
    answer: Measured | None = None
    orders = 0

    def submit(self, assignment: Assignment) -> Future[Measured]:
        type(self).orders += 1
        done = super().submit(assignment)
        if type(self).orders != 3:
            return done
        type(self).kept, type(self).answer = Future(), done.result()
        return type(self).kept


def test_a_late_answer_is_recorded_and_never_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease expires at once, the candidate is measured elsewhere, then the answer comes after all."""
    monkeypatch.setattr(Silent, "orders", 0)
    monkeypatch.setattr("cluster.loop.LEASE_GRACE_SECONDS", -1e6)
    waited = Answers.wait

    def wait(self: Answers, seconds: float) -> bool:
        """The answer that is kept back is let go three looks after the engine fell silent."""
        if Silent.kept is not None and not Silent.kept.done():
            looks.append(seconds)
            if len(looks) == 4:
                Silent.kept.set_result(Silent.answer)
        return waited(self, seconds)

    looks: list[float] = []
    monkeypatch.setattr(Answers, "wait", wait)
    folder = tmp_path / "c"
    run_campaign(campaign(folder, opened_with(2, Silent), max_attempts=10))
    state = read_state(folder)
    leases = [e.payload for e in read_events(folder / FOLDER) if e.kind == "lease" and e.payload["state"] == "expired"]
    assert len(leases) == 1
    number = leases[0]["assignment"]
    late = [row.attempt for row in state.attempts if row.assignment == number]
    assert [(attempt.verdict, attempt.speedup) for attempt in late] == [(Verdict.INVALID, None)]
    assert late[0].reason.startswith("late:")
    candidate = next(
        e.payload["candidate_id"] for e in read_events(folder / FOLDER) if e.payload.get("assignment") == number
    )
    again = [row for row in state.attempts_of(candidate) if row.assignment != number]
    assert again, "it was measured elsewhere"


def test_a_lost_builder_costs_a_try(tmp_path: Path) -> None:
    class Unsteady(LocalBuilder):
        left = 2

        def submit(self, candidate: Candidate) -> Future[Any]:
            if candidate.parts and self.left:
                self.left -= 1
                future: Future[Any] = Future()
                future.set_exception(MachineError("the builder is gone"))
                return future
            return super().submit(candidate)

    result = run_campaign(campaign(tmp_path / "c", opened_with(builder=Unsteady), max_attempts=10))
    assert result["verdict"] == "faster"
    failed = [row.attempt for row in read_state(tmp_path / "c").attempts if row.attempt.verdict is Verdict.FAILED]
    assert all("SIGSEGV" in attempt.reason for attempt in failed), "only the part that crashes"


AGENTS_PART = part("agents-attention", "self_attn")


def test_an_agents_part_opens_a_study_version_and_is_composed_into_the_winner(tmp_path: Path) -> None:
    """Alone it is handed in; within the incumbent, and beside the catalogue's parts, the search tries it by itself."""
    folder = tmp_path / "c"
    candidate = Candidate(parts=(PartUse(source=AGENTS_PART),), numerics=Numerics.TOLERANCE)
    ticket = Inbox(folder).submit(Proposal(candidate=candidate, proposer="agent:attention"), "agent:attention", "1")
    assert ticket.standing == "queued"
    factors = {**FACTORS, "agents-attention": 0.5}
    result = run_campaign(campaign(folder, opened_with(factors=factors)))
    state = read_state(folder)
    spaces = decisions(folder, "space")
    assert len(spaces) == 2
    assert spaces[1]["previous"] == spaces[0]["version"]
    assert state.candidates[candidate.id].proposer == "agent:attention"
    assert "agents-attention" in result["best"]["label"]
    assert "quick-mlp" in result["best"]["label"]
    assert result["best"]["speedup_vs_loaded"]["value"] == pytest.approx(1 / 0.35, rel=0.03)
    assert state.shares.arms["agent:attention"].attempts >= 1


def test_the_control_searches_without_agents_on_its_share(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    candidate = Candidate(parts=(PartUse(source=AGENTS_PART),), numerics=Numerics.TOLERANCE)
    Inbox(folder).submit(Proposal(candidate=candidate, proposer="agent:attention"), "agent:attention", "1")
    run_campaign(campaign(folder, control="random", control_share=0.3, max_attempts=40))
    state = read_state(folder)
    own = [info for info in state.candidates.values() if info.proposer == "control:random"]
    assert own
    assert not any("agents-attention" in info.parts for info in own)
    total = sum(arm.seconds for arm in state.shares.arms.values())
    assert state.shares.arms["control"].seconds / total == pytest.approx(0.3, abs=0.12)


def test_a_search_without_a_sampler_measures_what_is_handed_in_and_ends(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    candidate = Candidate(parts=(PartUse(source=PARTS[0]),), numerics=Numerics.TOLERANCE)
    Inbox(folder).submit(Proposal(candidate=candidate, proposer="person"), "person", "1")
    run_campaign(campaign(folder, sampler="none"))
    state = read_state(folder)
    assert set(state.candidates) == {candidate.id}
    assert state.stop_reason == "nothing more was handed in"


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"engine_budget": "3s"}, "3 engine seconds are spent"),
        ({"target_speedup": 1.2}, "the target of 1.2 times as loaded is reached"),
        ({"patience": "1s", "budget": "1h"}, "no new incumbent in"),
    ],
)
def test_each_budget_stops_the_search_and_says_so(tmp_path: Path, limit: dict[str, object], reason: str) -> None:
    run_campaign(campaign(tmp_path / "c", **limit))
    assert reason in read_state(tmp_path / "c").stop_reason


def test_two_objectives_are_told_to_the_study(tmp_path: Path) -> None:
    run_campaign(campaign(tmp_path / "c", objective="tokens_per_s,ttft", max_attempts=15))
    rows = [row.attempt for row in read_state(tmp_path / "c").attempts if row.attempt.verdict.is_timed]
    assert all({"ttft", "tpot"} <= attempt.ratios.keys() for attempt in rows)
    assert any(attempt.ratios["ttft"] > 1.2 for attempt in rows)


RIVALS = {f"rival-{index}": 1 / (1.04 + 0.05 * index) for index in range(4)}
"""Of the shallow cuts: factors on the step time, each quicker than the one before, none so quick that it needs no replay."""


class Shallow(FakeEngine):
    """Until its cuts are deepened, the fast tier sees each rival as much faster as the whole model is slower with it."""

    deep = False

    def measure(self, assignment: Assignment) -> MeasureResult:
        honest = self.deep or assignment.tier is Tier.SLOW or assignment.purpose is Purpose.COLD
        factors = {name: 1 / factor for name, factor in RIVALS.items()} if honest else RIVALS
        self.step_time = step_time_from_costs(20.0, factors)
        return super().measure(assignment)


class Deepens(LocalEngine):
    """Has one deeper cut, once."""

    def __init__(self, server: EngineServer) -> None:
        super().__init__(server)
        self.widen = self.deepen

    def deepen(self) -> tuple[int, ...]:
        engine = self.server.engine
        assert isinstance(engine, Shallow)
        if engine.deep:
            return ()
        engine.deep = True
        return (4, 8)


def test_a_fast_tier_that_ranks_unlike_the_slow_one_is_deepened_and_then_believed(tmp_path: Path) -> None:
    """Four candidates lead on the fast tier one after the other, and the slow one refuses each: tau is -1 over six pairs."""

    @contextlib.contextmanager
    def opened(plan: Plan, view: View) -> Iterator[Machines]:
        server = EngineServer(engine_spec(plan), lambda spec, _: Shallow("fake-0", noise=0.0005))
        builder = LocalBuilder(BuilderServer(server.spec, plan.deployment, 10.0))
        yield Machines(engines=[Deepens(server)], builder=builder, build_ahead=False, compiler=True)

    places = ("mlp", "self_attn", "input_layernorm", "post_attention_layernorm")
    parts = tuple(part(name, place) for name, place in zip(RIVALS, places, strict=True))
    folder = tmp_path / "c"
    running = campaign(folder, opened, sampler="none", max_attempts=20)
    running.catalogue = lambda device: parts
    inbox = Inbox(folder)
    for number, source in enumerate(parts):
        candidate = Candidate(parts=(PartUse(source=source),), numerics=Numerics.TOLERANCE)
        inbox.submit(Proposal(candidate=candidate, proposer="person"), "person", str(number))
    result = run_campaign(running)
    (widened,) = decisions(folder, "widen")
    assert (widened["tau"], widened["pairs"], widened["layers"]) == (-1.0, 6, [4, 8])
    state = read_state(folder)
    assert state.widened == 1
    own = [row.seq for row in state.attempts if row.attempt.purpose is Purpose.AA]
    assert len(own) == 2, "what is correct and what is noise is learned anew"
    slow = {row.attempt.verdict for row in state.attempts if row.attempt.tier is Tier.SLOW}
    assert slow == {Verdict.SLOWER}
    assert result["verdict"] != "faster"
    assert tau_between_tiers(state) == (None, 0), "only what was measured since then counts"
    assert replay(folder, parts).differing == ()


def test_tiers_that_rank_alike_leave_the_cut_and_such_that_do_not_widen_it() -> None:
    from cluster.state import AttemptRow
    from tests.search.builders import attempt

    def state_of(slow: list[float]) -> CampaignState:
        state = CampaignState()
        for number, (fast_value, slow_value) in enumerate(zip((1.1, 1.3, 1.5, 1.7), slow, strict=True)):
            for tier, value in ((Tier.FAST, fast_value), (Tier.SLOW, slow_value)):
                judged = attempt(f"c{number}", "loaded", value, tier=tier, purpose=Purpose.SEARCH)
                state.attempts.append(
                    AttemptRow(
                        seq=number,
                        assignment=number,
                        elapsed_seconds=0.0,
                        attempt=judged,
                        speedup_vs_loaded=judged.speedup,
                    )
                )
        return state

    assert tau_between_tiers(state_of([1.1, 1.3, 1.5, 1.7])) == (1.0, 6)
    assert not needs_wider_cut(state_of([1.1, 1.3, 1.5, 1.7]))
    tau, pairs = tau_between_tiers(state_of([1.7, 1.5, 1.3, 1.1]))
    assert (tau, pairs) == (-1.0, 6)
    assert LEAST_TAU > -1.0
    assert needs_wider_cut(state_of([1.7, 1.5, 1.3, 1.1]))
    assert not needs_wider_cut(state_of([1.3, 1.31, 1.3, 1.31])), "pairs that the replays leave open say nothing"
