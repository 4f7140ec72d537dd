"""Where choices come from besides the sampler: screening each part alone, one change away from a candidate, chance.

Pure functions of a space and a candidate. They say what could be tried and why; the study knows what was tried already,
and the policy decides whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from hotpass.canonical import canonical_json, content_hash
from hotpass.parts import declaration
from hotpass.records.candidate import Candidate, Numerics, PartSource, Reload
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Tier
from search.catalogue import applicable
from search.options import REFERENCE, SERVING_SETTINGS, Dial, Option
from search.space import PLAN, Choices, Space, answers

WHOLE_MODEL = "model"
"""The slot of the whole forward."""


class Proposer(StrEnum):
    """Who proposed: the first word of `Proposal.proposer`."""

    SCREENING = "screening"
    """The catalogue: each part once alone in the incumbent."""
    NEIGHBOUR = "neighbour"
    """One change away from the incumbent."""
    OPTUNA = "optuna"
    TUNER = "tuner"
    """Parameters and settings within the incumbent's composition."""
    RANDOM = "random"
    SERVING = "serving"
    """Settings of the serving loop, straight on the slow tier."""
    WARM = "warm"
    """What was fastest in an earlier campaign."""
    NEWCOMER = "newcomer"
    """A part that an agent or a person brought, once alone in the incumbent."""
    PERSON = "person"


def turn_of(proposer: str) -> int:
    """Whose enqueued choices go first: a person's, an earlier campaign's, a new part's, then what is near the newest incumbent."""
    order = {Proposer.PERSON: 0, Proposer.WARM: 1, Proposer.NEWCOMER: 2, Proposer.NEIGHBOUR: 3}
    return order.get(Proposer(proposer), 4) if proposer in list(Proposer) else 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One way to go on from a candidate."""

    choices: Choices
    what: str
    """What changes, in words."""
    hypothesis: str
    """Why it should be faster."""
    breadth: int
    """Slots that the changed part covers; 0 when a setting or a parameter changes."""


def alone(space: Space, option: Option, within: Candidate) -> Choices:
    """The part with its first admitted parameters in `within`, whose own parts give way where they clash; settings stay."""
    known = {option.source.sha256: option for option in space.options}
    kept = [
        (known[use.source.sha256], use.params)
        for use in within.parts
        if use.source.sha256 in known and not _gives_way(space, known[use.source.sha256], option)
    ]
    return _normal(space, space.choices_for([*kept, (option, {})], within.settings, within.parallelism))


def screening(space: Space, within: Candidate) -> list[Step]:
    """Each part once alone in `within`, widest claims first, then each other value of each setting."""
    steps = [
        Step(
            choices=alone(space, option, within),
            what=f"{option.source.name} alone",
            hypothesis=option.summary,
            breadth=len(option.covers),
        )
        for option in space.options
    ]
    return _admitted(space, [*steps, *_setting_steps(space, within, space.dials), *_plan_steps(space, within)])


def needs_building(
    parts: Sequence[PartSource], deployment: Deployment, *, allowed: Numerics, compiler: bool
) -> list[Candidate]:
    """What screening will ask for, as far as that is known before an engine has said what slots it has: each applicable part with
    sources to compile or weights to derive, alone and with its defaults. Those of the whole model first, since screening begins with
    them, and of these those to compile."""
    found = []
    for source in parts:
        declared = declaration(source)
        is_made = declared.native or declared.reload is Reload.REWEIGHT
        if not is_made or applicable(source, deployment, compiler=compiler):
            continue
        use = declared.bind(source)
        numerics = declared.numerics_of(use.params, deployment.model.dtype)
        if numerics.rank <= allowed.rank:
            order = (declared.claims != (WHOLE_MODEL,), not declared.native)
            found.append((order, Candidate(parts=(use,), numerics=numerics)))
    return [candidate for _, candidate in sorted(found, key=lambda pair: pair[0])]


def neighbours(space: Space, within: Candidate) -> list[Step]:
    """Every admitted candidate that is one change away: another parameter, another part, another setting, a part less."""
    base = space.choices_of(within)
    if base is None:
        return screening(space, within)
    walk = space.walk(answers(base), base)
    steps = []
    for use, option in zip(walk.uses, walk.options, strict=True):
        for name, values in option.params.items():
            for value in values:
                if value != use.params[name]:
                    used = [
                        (o, {**u.params, name: value} if o is option else u.params)
                        for u, o in zip(walk.uses, walk.options, strict=True)
                    ]
                    choices = _normal(space, space.choices_for(used, within.settings, within.parallelism))
                    what = f"{use.source.name}: {name} = {value}"
                    steps.append(Step(choices=choices, what=what, hypothesis=f"{what} suits these shapes", breadth=0))
    taken = {option.key for option in walk.options}
    for option in space.options:
        if option.key not in taken:
            steps.append(
                Step(
                    choices=alone(space, option, within),
                    what=f"with {option.source.name}",
                    hypothesis=option.summary,
                    breadth=len(option.covers),
                )
            )
    steps += [*_setting_steps(space, within, space.dials), *_plan_steps(space, within)]
    for option in walk.options:
        choices = _normal(space, {**base, space.place_of(option).name: REFERENCE})
        what = f"without {option.source.name}"
        steps.append(Step(choices=choices, what=what, hypothesis="the part costs more than it saves", breadth=0))
    return _admitted(space, steps)


def serving_steps(space: Space, within: Candidate) -> list[Step]:
    """`within` with each other value of each setting of the serving loop, for the slow tier."""
    return _admitted(space, list(_setting_steps(space, within, space.serving_dials)))


def on_fixed_shapes(candidate: Candidate) -> str:
    """What the fast tier sees of a candidate: equal for two that differ in settings of the serving loop alone."""
    parts = sorted(canonical_json([_sha256(use.source), use.params]) for use in candidate.parts)
    kept = {name: value for name, value in candidate.settings.items() if name not in SERVING_SETTINGS}
    return content_hash([parts, kept, dict(candidate.parallelism)])


def lowest_tier(candidate: Candidate, incumbent: Candidate) -> Tier:
    """The cheapest tier that can tell the two apart: the slow one when only settings of the serving loop differ."""
    return Tier.SLOW if on_fixed_shapes(candidate) == on_fixed_shapes(incumbent) else Tier.FAST


@lru_cache(maxsize=1024)
def _sha256(source: PartSource) -> str:
    return source.sha256


def _gives_way(space: Space, option: Option, newcomer: Option) -> bool:
    return option.key == newcomer.key or space.clashes(option, [newcomer])


def _setting_steps(space: Space, within: Candidate, dials: tuple[Dial, ...]) -> Iterator[Step]:
    base = space.choices_of(within)
    if base is None:
        return
    asked = space.walk(answers(base), base).choices
    for dial in dials:
        for text in dial.texts:
            if dial.name in asked and text != asked[dial.name]:
                what = f"{dial.setting.name} = {text}"
                choices = _normal(space, {**base, dial.name: text})
                yield Step(choices=choices, what=what, hypothesis=dial.setting.doc, breadth=0)


def _plan_steps(space: Space, within: Candidate) -> Iterator[Step]:
    """The candidate with each other plan."""
    base = space.choices_of(within)
    for text, plan in zip(space.plan_texts, space.plans, strict=True):
        if base is not None and len(space.plans) > 1 and text != base[PLAN]:
            choices = _normal(space, {**base, PLAN: text})
            named = " ".join(f"{kind}{degree}" for kind, degree in plan.items()) or "as loaded"
            yield Step(choices=choices, what=f"plan {named}", hypothesis="survived the cost model", breadth=0)


def _normal(space: Space, choices: Choices) -> Choices:
    """Exactly the questions that a walk with these answers asks, answered."""
    return space.walk(answers(choices), choices).choices


def _admitted(space: Space, steps: list[Step]) -> list[Step]:
    return [step for step in steps if space.admits(space.to_candidate(step.choices))]
