"""The study: nothing asked twice, values chained, faults told apart, an end that is certain, the same on every Optuna."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import optuna
import pytest

from hotpass.records.candidate import AS_LOADED, Candidate, PartSource
from hotpass.records.measurement import Purpose, Tier, Verdict
from search import proposers
from search.space import Space
from search.study import Ask, Study
from search.trials import derive_seed
from tests.search.builders import attempt, deployment, part, slot_table

PARTS = [
    part("whole", ["model"], params={"bits": (32, 8, 4)}),
    part("layer", ["model.layers.*"], keeps=("self_attn",)),
    part("mlp", ["model.layers.*.mlp"], params={"fuse": (False, True), "tile": (16, 32, 64)}),
    part("attention", ["model.layers.*.self_attn"], params={"split": (1, 2, 4)}),
]


def space_of(*parts: PartSource) -> Space:
    return Space.build(deployment(), slot_table(), parts, applies=lambda source: None)


def log_speedup(candidate: Candidate) -> float:
    """A landscape with its best at whole(bits=4), threads as loaded."""
    gain = 0.0
    for use in candidate.parts:
        gain += {"whole": 0.5, "layer": 0.2, "mlp": 0.1, "attention": 0.15}[use.source.name]
        gain += {32: 0.0, 8: 0.5, 4: 1.0}.get(use.params.get("bits"), 0.0)  # type: ignore[call-overload]
        gain += {16: 0.0, 32: 0.1, 64: 0.05}.get(use.params.get("tile"), 0.0)  # type: ignore[call-overload]
    return gain - 0.2 * ("threads" in candidate.settings) - 0.1 * ("compile_mode" in candidate.settings)


def run(study: Study, count: int) -> list[Ask]:
    asks = []
    for _ in range(count):
        ask = study.ask()
        if ask is None:
            break
        asks.append(ask)
        study.tell(attempt(ask.candidate.id, AS_LOADED.id, math.exp(log_speedup(ask.candidate))))
    return asks


def test_eight_asks_at_once_after_eight_tells_are_all_different() -> None:
    study = Study(space_of(*PARTS), seed=42)
    run(study, 8)
    waiting = [study.ask() for _ in range(8)]
    ids = {ask.candidate.id for ask in waiting if ask}
    assert len(ids) == 8
    assert AS_LOADED.id not in ids


def test_a_small_space_is_asked_through_once_and_then_exhausted() -> None:
    space = space_of(PARTS[0], PARTS[3])
    size = space.size()
    assert not size.is_bound
    study = Study(space, seed=0)
    asks = run(study, 1000)
    assert len({ask.candidate.id for ask in asks}) == len(asks) == size.candidates - 1, "as loaded is not asked"
    assert study.ask() is None
    assert study.exhausted == f"space exhausted: all {size.candidates} candidates are tried"


def test_equal_seeds_give_equal_asks_and_others_do_not() -> None:
    def ids(seed: int) -> list[str]:
        return [ask.candidate.id for ask in run(Study(space_of(*PARTS), seed=seed), 20)]

    assert ids(3) == ids(3)
    assert ids(3) != ids(4)
    assert derive_seed(7, "agent", 1) != derive_seed(7, "agent", 2) != derive_seed(8, "agent", 2)
    assert 0 <= derive_seed(7, "x") < 2**31


def test_enqueued_choices_come_first_in_order_and_once() -> None:
    space = space_of(*PARTS)
    study = Study(space, seed=1)
    steps = proposers.screening(space, AS_LOADED)
    assert all(study.enqueue(step.choices, proposer="screening", hypothesis=step.hypothesis) for step in steps)
    assert not any(study.enqueue(step.choices, proposer="screening") for step in steps)
    asks = [study.ask() for _ in steps]
    assert [ask.candidate.id for ask in asks if ask] == [space.to_candidate(step.choices).id for step in steps]
    assert asks[0] is not None
    assert asks[0].proposal.proposer == "screening"
    assert asks[0].proposal.hypothesis == "whole reads less memory."
    later = study.ask()
    assert later is not None
    assert later.proposal.proposer in ("optuna", "random")


def test_what_is_near_a_new_incumbent_goes_before_the_rest_of_the_screening() -> None:
    space = space_of(*PARTS)
    study = Study(space, seed=1)
    for step in proposers.screening(space, AS_LOADED):
        study.enqueue(step.choices, proposer=proposers.Proposer.SCREENING)
    first = study.ask()
    assert first is not None
    near = [
        step
        for step in proposers.neighbours(space, first.candidate)
        if study.enqueue(step.choices, proposer="neighbour")
    ]
    assert [step.what for step in near[:2]] == ["whole: bits = 8", "whole: bits = 4"]
    asked = [study.ask() for _ in range(len(near) + 1)]
    assert [ask.proposal.proposer for ask in asked if ask] == ["neighbour"] * len(near) + ["screening"]


def test_values_are_chained_through_incumbents() -> None:
    study = Study(space_of(*PARTS), seed=1)
    first, second, third = (ask for ask in (study.ask(), study.ask(), study.ask()) if ask)
    assert study.tell(attempt(first.candidate.id, AS_LOADED.id, 2.0)) == pytest.approx(math.log(2))
    assert study.tell(attempt(second.candidate.id, first.candidate.id, 1.5)) == pytest.approx(math.log(3))
    with pytest.raises(ValueError, match="never measured"):
        study.tell(attempt(third.candidate.id, "f" * 64, 1.5))


def test_the_fast_tiers_value_stays() -> None:
    study = Study(space_of(*PARTS), seed=1)
    ask = study.ask()
    assert ask is not None
    study.tell(attempt(ask.candidate.id, AS_LOADED.id, 2.0))
    study.tell(attempt(ask.candidate.id, AS_LOADED.id, 1.4, tier=Tier.SLOW))
    assert study.values[ask.candidate.id] == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        (Verdict.FAILED, optuna.trial.TrialState.PRUNED),
        (Verdict.INCORRECT, optuna.trial.TrialState.PRUNED),
        (Verdict.INVALID, optuna.trial.TrialState.FAIL),
    ],
)
def test_a_verdict_without_a_time_tells_no_value(
    tmp_path: Path, verdict: Verdict, state: optuna.trial.TrialState
) -> None:
    storage = f"sqlite:///{tmp_path / 'optuna.db'}"
    study = Study(space_of(*PARTS), seed=1, storage=storage)
    ask = study.ask()
    assert ask is not None
    assert study.tell(attempt(ask.candidate.id, AS_LOADED.id, verdict=verdict)) is None
    assert ask.candidate.id not in study.values
    trial = optuna.load_study(study_name=study.name, storage=storage).trials[ask.trial]
    assert (trial.state, trial.values) == (state, None)


def test_a_part_that_always_fails_alike_is_soon_left_alone() -> None:
    study = Study(space_of(*PARTS), seed=5)
    asked_whole = []
    for number in range(60):
        ask = study.ask()
        assert ask is not None
        whole = any(use.source.name == "whole" for use in ask.candidate.parts)
        asked_whole.append(whole)
        if whole:
            reason = f"the child died at 0x{number:x} after {number}.5 s"
            study.tell(attempt(ask.candidate.id, AS_LOADED.id, verdict=Verdict.FAILED, reason=reason))
        else:
            study.tell(attempt(ask.candidate.id, AS_LOADED.id, math.exp(log_speedup(ask.candidate))))
    assert sum(asked_whole) == 3
    ((choice, breaker),) = study.broken.items()
    assert choice == ("model", study.space.options[0].key)
    assert breaker.family == "failed: the child died at # after # s"
    steps = proposers.screening(study.space, AS_LOADED)
    assert not study.enqueue(steps[0].choices, proposer="screening")
    assert study.extended(space_of(*PARTS, part("new", ["model"]))).broken.keys() == study.broken.keys()


def test_the_sampler_keeps_away_from_what_fails_in_different_ways() -> None:
    study = Study(space_of(*PARTS), seed=5)
    asked_whole = []
    for number in range(40):
        ask = study.ask()
        assert ask is not None
        whole = any(use.source.name == "whole" for use in ask.candidate.parts)
        asked_whole.append(whole)
        if whole:
            reason = f"way {chr(97 + number % 26) * 3} of failing"
            study.tell(attempt(ask.candidate.id, AS_LOADED.id, verdict=Verdict.FAILED, reason=reason))
        else:
            study.tell(attempt(ask.candidate.id, AS_LOADED.id, math.exp(log_speedup(ask.candidate))))
    assert study.broken == {}
    assert sum(asked_whole[20:]) < sum(asked_whole[:20])


def test_non_finite_speedups_are_never_told() -> None:
    study = Study(space_of(*PARTS), seed=1)
    for value in (math.inf, math.nan):
        ask = study.ask()
        assert ask is not None
        assert study.tell(attempt(ask.candidate.id, AS_LOADED.id, value, verdict=Verdict.INCONCLUSIVE)) is None
        assert ask.candidate.id not in study.values


def test_a_lost_measurement_fails_once_and_a_late_one_is_recorded() -> None:
    study = Study(space_of(*PARTS), seed=1)
    ask = study.ask()
    assert ask is not None
    study.give_up(ask.candidate.id)
    study.give_up(ask.candidate.id)
    assert study.tell(attempt(ask.candidate.id, AS_LOADED.id, 2.0)) == pytest.approx(math.log(2))
    assert study.values[ask.candidate.id] == pytest.approx(math.log(2))


def test_the_sampler_finds_the_best_of_the_landscape_sooner_than_chance() -> None:
    space = space_of(*PARTS)
    best = max(log_speedup(space.to_candidate(choices)) for choices in space.every())

    def asks_until_best(study: Study) -> int:
        for count in range(1, 100):
            if log_speedup(run(study, 1)[0].candidate) == best:
                return count
        raise AssertionError("not found in 100 asks")

    by_study = sorted(asks_until_best(Study(space, seed=seed)) for seed in range(5))
    rng = random.Random(0)

    def draws_until_best() -> int:
        seen: set[str] = set()
        while True:
            candidate = space.to_candidate(space.sample(rng))
            seen.add(candidate.id)
            if log_speedup(candidate) == best:
                return len(seen)

    by_chance = sorted(draws_until_best() for _ in range(101))
    assert by_study[2] < by_chance[50]


def test_an_extended_study_carries_over_what_was_learned() -> None:
    small, large = space_of(*PARTS[1:]), space_of(*PARTS)
    study = Study(small, seed=9)
    asks = run(study, 30)
    in_flight = study.ask()
    assert in_flight is not None
    study.enqueue(small.sample(random.Random(3)), proposer="person")
    extended = study.extended(large)
    assert extended.name != study.name
    assert dict(extended.values) == dict(study.values)
    assert all(extended.knows(ask.candidate) for ask in [*asks, in_flight])
    assert extended.enqueue(
        proposers.alone(large, large.options[0], AS_LOADED), proposer="agent", hypothesis="a new part"
    )
    assert extended.tell(attempt(in_flight.candidate.id, AS_LOADED.id, 1.1)) == pytest.approx(math.log(1.1))
    later = [extended.ask() for _ in range(10)]
    assert not {ask.candidate.id for ask in later if ask} & {ask.candidate.id for ask in asks}


def test_an_extended_study_carries_at_most_300_trials() -> None:
    many = [part(f"p{i}{kind}", [f"model.layers.*.{kind}"]) for i in range(20) for kind in ("mlp", "self_attn")]
    space = space_of(*many)
    study = Study(space, seed=0)
    rng = random.Random(0)
    while len(study.values) < 350:
        candidate = space.to_candidate(space.sample(rng))
        if not study.knows(candidate):
            study.seen(candidate)
            study.tell(attempt(candidate.id, AS_LOADED.id, 1.0 + rng.random()))
    extended = study.extended(space_of(*many, part("new", ["model"])))
    assert len(extended._study.trials) == 300
    assert len(extended.values) == 350


def test_a_study_is_rebuilt_from_attempts() -> None:
    space = space_of(*PARTS)
    study = Study(space, seed=2)
    asks = run(study, 12)
    again = Study(space, seed=2)
    for ask in asks:
        again.learn(ask.candidate, attempt(ask.candidate.id, AS_LOADED.id, math.exp(log_speedup(ask.candidate))))
    assert dict(again.values) == dict(study.values)
    assert len({ask.candidate.id for ask in run(again, 20)} & {ask.candidate.id for ask in asks}) == 0


def test_a_stored_study_starts_afresh_since_it_is_rebuilt_from_the_ledger(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'optuna.db'}"
    run(Study(space_of(*PARTS), seed=2, storage=storage), 3)
    study = Study(space_of(*PARTS), seed=2, storage=storage)
    assert len(optuna.load_study(study_name=study.name, storage=storage).trials) == 0
    assert optuna.load_study(study_name=study.name, storage=storage).user_attrs["seed"] == study.seed


def test_serving_settings_of_the_incumbent_stay_in_later_asks() -> None:
    space = space_of(*PARTS)
    study = Study(space, seed=2)
    study.set_incumbent(space.to_candidate(proposers.serving_steps(space, AS_LOADED)[0].choices))
    assert all(ask.candidate.settings.get("chunk_tokens") == 64 for ask in run(study, 8))


def test_what_differs_in_the_serving_loop_alone_is_one_candidate_to_the_fast_tier() -> None:
    space = space_of(*PARTS)
    study = Study(space, seed=2)
    quick = run(study, 1)[0].candidate
    served = space.to_candidate({**space.choices_of(quick), "set chunk_tokens": "64"})  # type: ignore[dict-item]
    assert study.knows(served)
    study.learn(served, attempt(served.id, quick.id, 1.5, tier=Tier.SLOW))
    assert study.values[served.id] == study.values[quick.id], "the fast tier's shapes do not see the difference"
    study.set_incumbent(served)
    asked = run(study, 30)
    seen = [proposers.on_fixed_shapes(candidate) for candidate in (quick, *(ask.candidate for ask in asked))]
    assert len(set(seen)) == len(seen)


def test_what_was_learned_from_an_earlier_session_is_no_longer_asked() -> None:
    space = space_of(*PARTS)
    study = Study(space, seed=2)
    step = proposers.screening(space, AS_LOADED)[0]
    assert study.enqueue(step.choices, proposer="screening")
    known = space.to_candidate(step.choices)
    study.learn(known, attempt(known.id, AS_LOADED.id, 1.5))
    assert known.id not in {ask.candidate.id for ask in run(study, 20)}


def test_a_second_look_of_an_earlier_session_gives_the_value_that_its_first_could_not() -> None:
    space = space_of(*PARTS)
    study = Study(space, seed=2)
    known = space.to_candidate(proposers.screening(space, AS_LOADED)[0].choices)
    study.learn(known, attempt(known.id, AS_LOADED.id, verdict=Verdict.INVALID, reason="disturbed"))
    assert known.id not in study.values
    for _ in range(2):  # the second of these is no other trial: the fast tier's value stays
        study.learn(known, attempt(known.id, AS_LOADED.id, 1.5, purpose=Purpose.REMEASURE))
    assert study.values[known.id] == pytest.approx(math.log(1.5))


def test_no_private_optuna_is_used() -> None:
    import search.study

    text = Path(search.study.__file__).read_text()
    assert not re.findall(r"optuna\.[\w.]*\b_\w+|system_attrs|_study\._|trial\._", text)
