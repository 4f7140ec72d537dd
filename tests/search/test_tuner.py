"""Numbers within one composition: a planted optimum is found in a few asks, and nothing but numbers and settings changes."""

from __future__ import annotations

import math
from functools import partial

import pytest

from cluster.proposing import StudyProposer
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, PartUse
from search.options import Dial
from search.proposers import Proposer
from search.space import Space
from search.study import Study
from search.tuner import Tuner, axes_of
from tests.search.builders import attempt, deployment, part, slot_table

STEPS = (1, 2, 4, 8, 16, 32, 64, 128)
MLP = part(
    "mlp", ["model.layers.*.mlp"], params={"tile": STEPS, "unroll": STEPS, "ahead": STEPS, "fuse": (False, True)}
)
OTHER = part("attention", ["model.layers.*.self_attn"], params={"split": (1, 2, 4)})
BEST = {"tile": 32, "unroll": 4, "ahead": 64, "fuse": True}


def space() -> Space:
    return Space.build(deployment(), slot_table(), [MLP, OTHER], applies=lambda source: None)


def gain(candidate: Candidate) -> float:
    """A hill over the logs of three sizes, which interact; with `fuse` a step up. Threads and the rest as loaded are best."""
    use = next(use for use in candidate.parts if use.source.name == "mlp")
    off = [math.log2(float(use.params[name])) - math.log2(float(BEST[name])) for name in ("tile", "unroll", "ahead")]  # type: ignore[arg-type]
    bowl = sum(x * x for x in off) + 0.5 * off[0] * off[1]
    return 1.0 - 0.03 * bowl + 0.1 * bool(use.params["fuse"]) - 0.05 * len(candidate.settings)


def incumbent_of(space: Space) -> Candidate:
    option = next(option for option in space.options if option.source.name == "mlp")
    return space.to_candidate(space.choices_for([(option, option.declaration.bind(MLP).params)], {}))


def tell(study: Study, candidate: Candidate) -> None:
    study.learn(candidate, attempt(candidate.id, AS_LOADED.id, math.exp(gain(candidate))))


def asks_until(best: float, count: int, *, by_chance: bool) -> int:
    """So many candidates of one composition until one is within 2 % of that gain; `count` when none is."""
    where, tuner = space(), Tuner(3)
    study = Study(where, seed=3, sampler="random")
    incumbent = incumbent_of(where)
    tell(study, incumbent)
    for number in range(count):
        values = {} if by_chance else study.timed()
        choices = tuner.ask(where, incumbent, values, study.may_ask)
        assert choices is not None
        found = where.to_candidate(choices)
        assert [use.source.name for use in found.parts] == ["mlp"]
        tell(study, found)
        if gain(found) >= best - 0.02:
            return number
    return count


def test_a_planted_numeric_optimum_is_found_among_thousands_in_a_few_asks() -> None:
    best = gain(Candidate(parts=(PartUse(source=MLP, params=BEST),)))
    assert (
        math.prod(len(axis.texts) for axis in axes_of(space(), space().choices_of(incumbent_of(space())) or {})) > 4000
    )
    assert asks_until(best, 40, by_chance=False) < 40
    assert asks_until(best, 40, by_chance=True) == 40


def test_axes_are_the_numbers_of_the_composition_in_their_order() -> None:
    where = space()
    axes = axes_of(where, where.choices_of(incumbent_of(where)) or {})
    by_name = {axis.name.rsplit(" / ", 1)[-1]: axis for axis in axes}
    assert by_name["tile"].is_ordered
    assert by_name["tile"].texts == tuple(str(step) for step in STEPS)
    assert not by_name["fuse"].is_ordered, "true and false are no numbers"
    assert not any("split" in name for name in by_name), "a part that is not in the incumbent"
    assert {name for name in by_name if name.startswith("set ")} == {dial.name for dial in where.dials if _varies(dial)}


def _varies(dial: Dial) -> bool:
    return len(dial.values) > 1


def test_the_same_knowledge_gives_the_same_ask() -> None:
    where = space()
    study, incumbent = Study(where, seed=3, sampler="random"), incumbent_of(where)
    for number in range(8):
        choices = Tuner(number).ask(where, incumbent, {}, study.may_ask)
        assert choices is not None
        tell(study, where.to_candidate(choices))
    first, again = Tuner(3), Tuner(3)
    asks = [partial(tuner.ask, where, incumbent, study.timed(), study.may_ask) for tuner in (first, again)]
    assert asks[0]() == asks[1]()


def test_many_are_asked_before_the_first_is_answered() -> None:
    where, tuner = space(), Tuner(3)
    study, incumbent = Study(where, seed=3, sampler="random"), incumbent_of(where)
    study.seen(incumbent)
    for _ in range(30):
        choices = tuner.ask(where, incumbent, study.timed(), study.may_ask)
        assert choices is not None
        study.seen(where.to_candidate(choices))


def test_a_composition_without_anything_untried_is_used_up() -> None:
    where, tuner = space(), Tuner(3)
    incumbent = incumbent_of(where)
    assert tuner.may_ask(incumbent)
    assert tuner.ask(where, incumbent, {}, lambda choices: False) is None
    assert not tuner.may_ask(incumbent)


def proposer(tuner: str) -> StudyProposer:
    return StudyProposer(
        deployment(), slot_table(), [MLP], numerics=Numerics.TOLERANCE, compiler=True, seed=3, tuner=tuner
    )


def test_it_is_a_source_of_its_own_once_there_is_a_composition() -> None:
    made = proposer("gp")
    assert Proposer.TUNER not in made.sources(), "nothing is settled yet"
    incumbent = incumbent_of(made.space)
    made.tell(incumbent, attempt(incumbent.id, AS_LOADED.id, 1.5))
    made.follow(incumbent)
    assert Proposer.TUNER in made.sources()
    proposal = made.ask(incumbent, Proposer.TUNER)
    assert proposal is not None
    assert (proposal.proposer, proposal.parents) == (Proposer.TUNER, (incumbent.id,))
    again = made.ask(incumbent, Proposer.TUNER)
    assert again is not None
    assert again.candidate.id != proposal.candidate.id
    without = proposer("none")
    without.follow(incumbent)
    assert Proposer.TUNER not in without.sources()


def test_a_tuner_by_another_name_is_refused() -> None:
    from cluster.spec import make_spec

    with pytest.raises(InputError, match=r"tuner 'cma' is not known"):
        make_spec({"model": "m", "traffic": "chat", "tuner": "cma"})
