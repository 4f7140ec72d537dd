"""What a campaign expects of candidates: from its own log, wide while young, never of strangers, and held to audits."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest

from cluster.campaign import run_campaign
from cluster.events import read_events
from cluster.journal import FOLDER, read_state
from cluster.predicting import (
    LEAST_CANDIDATES,
    Decision,
    Foresight,
    attribution_of,
    audits_won,
    by_promise,
    effects_of,
    pairs_of,
    shown,
    things_of,
    trust_of,
)
from cluster.state import AttemptRow, CampaignState, CandidateInfo, IncumbentStep
from hotpass.canonical import to_plain
from hotpass.records.candidate import AS_LOADED, Candidate, PartUse
from hotpass.records.measurement import Attempt, Estimate, Purpose, Tier, Verdict
from tests.cluster.campaigns import make_running, part

TRUE = {"a": 0.40, "b": 0.10, "c": -0.30, "d": 0.02, "e": -0.15}
SOURCES = {name: part(name, "mlp") for name in TRUE}


def candidate(*names: str) -> Candidate:
    return Candidate(parts=tuple(PartUse(source=SOURCES[name]) for name in names))


def tell(
    state: CampaignState, names: tuple[str, ...], *, purpose: Purpose = Purpose.SEARCH, scale: float = 1.0
) -> None:
    """A timed attempt against the deployment as loaded."""
    value = math.exp(sum(TRUE[name] for name in names)) * scale
    speedup = Estimate(value=value, low=value * 0.98, high=value * 1.02)
    attempt = Attempt(
        candidate_id=candidate(*names).id, incumbent_id=AS_LOADED.id, tier=Tier.FAST, purpose=purpose,
        verdict=Verdict.FASTER if value > 1.02 else Verdict.SLOWER, reason="", speedup=speedup, tokens_per_second=1.0,
    )  # fmt: skip
    row = AttemptRow(
        seq=len(state.attempts), assignment=len(state.attempts), elapsed_seconds=0.0, attempt=attempt, speedup_vs_loaded=speedup
    )  # fmt: skip
    state.attempts.append(row)
    state.by_candidate.setdefault(attempt.candidate_id, []).append(row)


def propose(state: CampaignState, asked: Candidate, proposer: str = "optuna") -> None:
    state.candidates[asked.id] = CandidateInfo(
        candidate_id=asked.id, label=asked.label, numerics="tolerance", proposer=proposer, parents=(), hypothesis="",
        parts=(), settings={},
    )  # fmt: skip


ALL = [names for count in (1, 2, 3) for names in combinations(TRUE, count)]


@pytest.fixture
def grown() -> tuple[CampaignState, dict[str, Candidate]]:
    """A campaign that has timed all pairs and singles, and whose best is `a` with `b`."""
    state = CampaignState()
    told = [names for names in ALL if len(names) < 3] + [("a", "b", "d"), ("c", "d", "e")]
    for names in told:
        tell(state, names)
    best = Estimate(value=math.exp(0.5), low=1.6, high=1.7)
    state.incumbents.append(
        IncumbentStep(elapsed_seconds=0.0, candidate_id=candidate("a", "b").id, speedup_vs_loaded=best)
    )
    return state, {candidate(*names).id: candidate(*names) for names in ALL}


def test_things_are_parts_parameters_and_settings() -> None:
    bound = Candidate(parts=(PartUse(source=SOURCES["a"], params={"bits": 4}),), settings={"threads": 2})
    assert {shown(thing) for thing in things_of(bound)} == {"a", "a(bits=4)", "threads=2"}
    other = Candidate(parts=(PartUse(source=part("a", "self_attn")),))
    assert things_of(other) != things_of(candidate("a"))  # the same name, another source
    assert things_of(AS_LOADED) == frozenset()


def test_what_has_no_chance_is_left_out_and_what_has_is_not(grown: tuple[CampaignState, dict[str, Candidate]]) -> None:
    state, known = grown
    foresight = Foresight(state, known, seed=0)
    for names in (("b", "c", "e"), ("a", "b", "d")):
        propose(state, candidate(*names))
    hopeless, hopeful = (foresight.consider(candidate(*names)) for names in (("b", "c", "e"), ("a", "b", "d")))
    assert hopeless.decision in (Decision.PRUNE, Decision.AUDIT)
    assert hopeless.speedup_vs_loaded.value == pytest.approx(math.exp(-0.35), rel=0.03)
    assert hopeless.speedup_vs_loaded.kind == "predicted"
    assert hopeful.decision is Decision.MEASURE
    assert hopeless.num_candidates == 17


def test_strangers_people_and_the_young_are_always_measured(grown: tuple[CampaignState, dict[str, Candidate]]) -> None:
    state, known = grown
    foresight = Foresight(state, known, seed=0)
    asked = candidate("b", "c", "e")
    propose(state, asked, proposer="person")
    assert foresight.consider(asked).decision is Decision.MEASURE
    stranger = Candidate(parts=(*asked.parts, PartUse(source=part("new", "self_attn"))))
    propose(state, stranger)
    assert "new was never measured" in foresight.consider(stranger).reason
    young = CampaignState()
    for names in ALL[: LEAST_CANDIDATES - 1]:
        tell(young, names)
    propose(young, asked)
    assert f"only {LEAST_CANDIDATES - 1} candidates" in Foresight(young, known, seed=0).consider(asked).reason


def test_about_one_in_fifty_is_audited_and_a_beaten_prediction_ends_pruning(
    grown: tuple[CampaignState, dict[str, Candidate]],
) -> None:
    state, known = grown
    asked = candidate("b", "c", "e")
    propose(state, asked)
    drawn = [Foresight(state, known, seed=seed).consider(asked).decision for seed in range(300)]
    assert set(drawn) == {Decision.PRUNE, Decision.AUDIT}
    assert 1 <= drawn.count(Decision.AUDIT) <= 15
    assert drawn[:20] == [Foresight(state, known, seed=seed).consider(asked).decision for seed in range(20)]
    state.audit_beat = candidate("b", "c", "d").id
    assert Foresight(state, known, seed=0).consider(asked).decision is Decision.MEASURE


def test_a_model_that_cannot_tell_leaves_nothing_out(grown: tuple[CampaignState, dict[str, Candidate]]) -> None:
    state, known = grown
    for place, names in enumerate(ALL):
        tell(state, names, scale=0.5 if place % 2 else 2.0)
    asked = candidate("b", "c", "e")
    propose(state, asked)
    assert "off by" in Foresight(state, known, seed=0).consider(asked).reason


def test_the_most_promising_go_first(grown: tuple[CampaignState, dict[str, Candidate]]) -> None:
    state, known = grown
    waiting = [candidate(*names) for names in (("b", "c", "e"), ("a", "d", "e"), ("a", "b", "d"))]
    ordered = Foresight(state, known, seed=0).ordered(waiting, lambda item: item)
    assert ordered[0] == waiting[2]
    assert ordered[-1] == waiting[0]


def test_a_candidate_is_taken_apart(grown: tuple[CampaignState, dict[str, Candidate]]) -> None:
    state, known = grown
    tell(state, ("a", "b", "c"), scale=0.9)
    found = attribution_of(state, effects_of(state, known), candidate("a", "b", "c"))
    assert [shown(effect.thing) for effect in found.effects] == ["a", "b", "c"]
    assert math.prod(effect.speedup.value for effect in found.effects) == pytest.approx(found.predicted.value)
    assert found.beyond is not None
    assert found.beyond < 1.0
    assert attribution_of(state, effects_of(state, known), candidate("a", "c", "d")).beyond is None


def test_an_audit_that_was_won_is_taken_up_until_it_was_measured_again(
    grown: tuple[CampaignState, dict[str, Candidate]],
) -> None:
    state, _ = grown
    tell(state, ("a", "b", "e"), purpose=Purpose.AUDIT)
    tell(state, ("c", "e"), purpose=Purpose.AUDIT)  # slower, as was expected
    assert audits_won(state) == [candidate("a", "b", "e").id]
    tell(state, ("a", "b", "e"), purpose=Purpose.REMEASURE)
    assert audits_won(state) == []


def test_what_is_near_is_tried_by_what_was_learned(grown: tuple[CampaignState, dict[str, Candidate]]) -> None:
    state, known = grown
    near = [candidate(*names) for names in (("a", "b", "c"), ("a",), ("a", "b", "d"), ("b",))]
    ordered = by_promise(near, lambda item: item, effects_of(state, known), candidate("a", "b"))
    assert ordered[0] == near[2]
    assert ordered[-1] == near[3]
    assert by_promise(near, lambda item: item, effects_of(CampaignState(), known), candidate("a", "b")) == near


def test_failed_attempts_teach_nothing(grown: tuple[CampaignState, dict[str, Candidate]]) -> None:
    state, known = grown
    before = len(pairs_of(state.attempts, {AS_LOADED.id: AS_LOADED, **known}))
    failed = Attempt(
        candidate_id=candidate("a").id, incumbent_id=AS_LOADED.id, tier=Tier.FAST, purpose=Purpose.SEARCH,
        verdict=Verdict.FAILED, reason="", speedup=None, tokens_per_second=None,
    )  # fmt: skip
    state.attempts.append(
        AttemptRow(seq=99, assignment=99, elapsed_seconds=0.0, attempt=failed, speedup_vs_loaded=None)
    )
    assert len(pairs_of(state.attempts, {AS_LOADED.id: AS_LOADED, **known})) == before


def test_every_candidate_of_a_campaign_is_predicted_before_it_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    run_campaign(make_running(folder, max_attempts=12))
    events = list(read_events(folder / FOLDER))
    first = {}
    for event in events:
        if event.kind == "prediction":
            first.setdefault(event.payload["candidate_id"], event.seq)
    measured = {
        e.payload["candidate_id"]: e.seq for e in events if e.kind == "assignment" and e.payload["purpose"] == "search"
    }
    assert measured
    assert all(first[key] < seq for key, seq in measured.items())
    state = read_state(folder)
    trust = trust_of(state)
    assert trust.predicted >= len(measured)
    assert trust.measured > 0
    assert to_plain(trust)["pruned"] == 0  # too young for it


def test_a_long_search_does_not_learn_anew_with_every_attempt() -> None:
    from cluster.predicting import milestone

    assert [milestone(count) for count in range(32)] == list(range(32))
    for count in range(32, 20_000, 37):
        assert 0 <= count - milestone(count) <= count / 16
    assert len({milestone(count) for count in range(20_000)}) < 400
