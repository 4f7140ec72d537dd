"""The space that parts and settings span for one deployment: what may be proposed there, and how choices become a candidate.

    places, widest first:   model ─► model.layers.* ─► model.layers.*.mlp ─► …      each: reference, or one part with its parameters
    then settings:          threads, compile_mode, kv_dtype, …                      each: the engine's default, or another value
    then the plan           of parallelism, where the cost model left more than one

A *place* is a set of claims under one domain. Walking the places from the widest to the narrowest, a chosen part switches off
every part below that covers a slot it covers on a shape it serves, so no walk ever ends in a conflict. What the numerics
policy, the device or the machine does not admit is not in the space; `left_out` says why.

All choices are texts (part keys, or JSON of a value), so that they survive any storage. What is not here: which candidate to
try next (`search.study`, `search.proposers`), and whether it was tried before.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from hotpass.canonical import canonical_json, content_hash
from hotpass.parts import conflicts, declaration
from hotpass.records.candidate import Candidate, Numerics, PartSource, PartUse, Value
from hotpass.records.deployment import Deployment
from hotpass.records.slots import SlotTable
from hotpass.settings import Setting, numerics_of_settings
from search.options import Dial, Option, Place, build_dials, build_places, spelled

MAX_ENUMERATED = 4096
"""Up to this many combinations a space is counted exactly, and known to be exhausted."""

Choices = Mapping[str, str]
"""Name of a place, a part's parameter or a setting → the chosen text."""
NO_CHOICES: Choices = MappingProxyType({})
PlanOf = Mapping[str, int]
"""Kind of parallelism → degree, those of 1 left out; empty for the deployment as loaded."""
AS_IT_IS: PlanOf = MappingProxyType({})
PLAN = "plan"
"""The question which plan."""
Suggest = Callable[[str, tuple[str, ...]], str]
"""Asked for each choice in turn: (name, allowed texts, the first is the default) → one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceSize:
    candidates: int
    is_bound: bool
    """True when `candidates` is an upper bound, because the space is too large to be counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """One walk through the space: every question asked, and what came of the answers."""

    choices: dict[str, str]
    uses: tuple[PartUse, ...]
    options: tuple[Option, ...]
    settings: dict[str, Value]
    """Only those that differ from the defaults."""
    parallelism: PlanOf


@dataclass(frozen=True, kw_only=True)
class Space:
    """Made by `Space.build`; immutable. Another set of parts makes another space with another version."""

    places: tuple[Place, ...]
    dials: tuple[Dial, ...]
    serving_dials: tuple[Dial, ...]
    """Settings that only the slow tier can judge; a walk leaves them as they are, see `search.proposers`."""
    allowed: Numerics
    dtype: str
    """Declared dtype of the model: numerics classes are relative to it."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Part or setting → why it is not in the space."""
    plans: tuple[PlanOf, ...] = (AS_IT_IS,)
    """As loaded first, then the others that survived the cost model and that the engine can run."""

    @classmethod
    def build(
        cls,
        deployment: Deployment,
        slots: SlotTable,
        parts: Sequence[PartSource],
        *,
        allowed: Numerics = Numerics.TOLERANCE,
        compiler: bool = True,
        plans: Sequence[PlanOf] = (AS_IT_IS,),
        without: Mapping[str, str] = MappingProxyType({}),
        applies: Callable[[PartSource], str | None] | None = None,
    ) -> Space:
        """The space of `parts` and of every setting on this deployment, but those that are to be left out (`without`: setting → why).

        `compiler` says whether the machine has a C++ compiler. `applies` gives the reason why a part does not apply, or None; by
        default `search.catalogue.applicable` is asked. Raises InputError for a part whose declaration cannot be read.
        """
        places, parts_left_out = build_places(
            deployment,
            slots,
            parts,
            allowed,
            applies or (lambda source: _catalogue_reason(source, deployment, compiler)),
            compiler,
        )
        dials, serving_dials, settings_left_out = build_dials(deployment, allowed, compiler, without)
        one_plan = {PLAN: "one plan survives on this deployment"} if len(plans) == 1 else {}
        return cls(
            places=places,
            dials=dials,
            serving_dials=serving_dials,
            allowed=allowed,
            dtype=deployment.model.dtype,
            left_out={**parts_left_out, **settings_left_out, **one_plan},
            plans=tuple(plans),
        )

    @cached_property
    def version(self) -> str:
        """Hash of everything that may be chosen: equal versions have equal spaces."""
        content = {
            "places": [[p.name, [[o.key, o.source.sha256, o.params] for o in p.options]] for p in self.places],
            "dials": [[dial.name, dial.values] for dial in (*self.dials, *self.serving_dials)],
            "allowed": self.allowed,
            "dtype": self.dtype,
        } | ({"plans": self.plan_texts} if len(self.plans) > 1 else {})
        return content_hash(content)[:16]

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """Every part of the space, widest first."""
        found = [option for place in self.places for option in place.options]
        return tuple(sorted(found, key=lambda option: (-len(option.covers), option.key)))

    def walk(self, suggest: Suggest, base: Choices = NO_CHOICES) -> Walk:
        """Ask for each choice that is open, widest place first, and return what came of it.

        Serving settings are not asked for: they stay as in `base`, else at their defaults.
        """
        choices: dict[str, str] = {}
        uses: list[PartUse] = []
        taken: list[Option] = []
        for place in self.places:
            open_options = [option for option in place.options if not self.clashes(option, taken)]
            if not open_options:
                continue
            choices[place.name] = suggest(place.name, place.labels)
            option = next((option for option in open_options if option.key == choices[place.name]), None)
            if option is None:
                continue
            params: dict[str, Value] = {}
            said: list[str] = []
            for name, values in option.params.items():
                texts = spelled(values)
                asked = param_name(place, option, name)
                if len(texts) > 1:
                    choices[asked] = suggest(asked, texts)
                said.append(choices.get(asked, texts[0]))
                params[name] = values[texts.index(said[-1])]
            taken.append(option)
            uses.append(self._use(option, tuple(said), params))
        for dial in self.dials:
            if not _is_inert(dial.setting, taken):
                choices[dial.name] = suggest(dial.name, dial.texts)
        kept = answers(base)
        choices |= {dial.name: kept(dial.name, dial.texts) for dial in self.serving_dials}
        plan = self.plans[0]
        if len(self.plans) > 1:
            choices[PLAN] = suggest(PLAN, self.plan_texts)
            plan = self.plans[self.plan_texts.index(choices[PLAN])]
        settings: dict[str, Value] = {}
        for dial in (*self.dials, *self.serving_dials):
            value = json.loads(choices.get(dial.name, dial.texts[0]))
            if value != dial.setting.default:
                settings[dial.setting.name] = value
        return Walk(choices=choices, uses=tuple(uses), options=tuple(taken), settings=settings, parallelism=plan)

    def _use(self, option: Option, said: tuple[str, ...], params: Mapping[str, Value]) -> PartUse:
        """The part with these parameters (`said`: as texts, since True equals 1), the same object whenever it is chosen so: thousands of
        candidates are composed of a few hundred of them."""
        key = (option.key, said)
        if key not in self._uses:
            self._uses[key] = option.declaration.bind(option.source, params)
        return self._uses[key]

    @cached_property
    def _uses(self) -> dict[tuple[str, tuple[str, ...]], PartUse]:
        return {}

    def to_candidate(self, choices: Choices) -> Candidate:
        """The canonical candidate of some choices; what they leave open is the reference or the default.

        A text that is not among the allowed ones raises ValueError.
        """
        return self._candidate(self.walk(answers(choices), choices))

    def admits(self, candidate: Candidate) -> bool:
        """True when the numerics policy allows it (parameters that are allowed one by one may not be together)."""
        return self.allowed.allows(candidate.numerics)

    def sample(self, rng: random.Random, base: Choices = NO_CHOICES) -> Choices:
        """Choices drawn evenly at each question, admitted by the policy (as loaded is, so this ends)."""
        while True:
            walk = self.walk(lambda name, texts: rng.choice(texts), base)
            if self.admits(self._candidate(walk)):
                return walk.choices

    def choices_of(self, candidate: Candidate) -> Choices | None:
        """The choices that make this candidate, or None when it lies outside of the space."""
        options = {option.source.sha256: option for option in self.options}
        if any(use.source.sha256 not in options for use in candidate.parts):
            return None
        used = [(options[use.source.sha256], use.params) for use in candidate.parts]
        choices = self.choices_for(used, candidate.settings, candidate.parallelism)
        try:
            found = self.to_candidate(choices)
        except ValueError:
            return None
        return choices if found.id == candidate.id else None

    def every(self, base: Choices = NO_CHOICES) -> Iterator[Choices]:
        """All walks in a fixed order. Long for a large space: see `size`."""
        prefix: tuple[int, ...] = ()
        while True:
            asked: list[tuple[int, int]] = []
            yield self.walk(_numbered(prefix, asked), base).choices
            while asked and asked[-1][0] + 1 == asked[-1][1]:
                asked.pop()
            if not asked:
                return
            prefix = (*(index for index, _ in asked[:-1]), asked[-1][0] + 1)

    @cached_property
    def plan_texts(self) -> tuple[str, ...]:
        """Plans as choices."""
        return tuple(canonical_json(dict(plan)) for plan in self.plans)

    @cached_property
    def _bound(self) -> int:
        per_place = (
            1 + sum(math.prod(len(values) for values in option.params.values()) for option in place.options)
            for place in self.places
        )
        return math.prod(itertools.chain(per_place, (len(dial.values) for dial in self.dials), [len(self.plans)]))

    @cached_property
    def _size(self) -> SpaceSize:
        if self._bound > MAX_ENUMERATED:
            return SpaceSize(candidates=self._bound, is_bound=True)
        admitted = {c.id for c in map(self.to_candidate, self.every()) if self.admits(c)}
        return SpaceSize(candidates=len(admitted), is_bound=False)

    def size(self) -> SpaceSize:
        """How many candidates the space holds, as loaded included; exact up to `MAX_ENUMERATED`, else an upper bound."""
        return self._size

    @cached_property
    def _clashing(self) -> frozenset[tuple[str, str]]:
        return frozenset(
            (a.key, b.key)
            for a, b in itertools.permutations(self.options, 2)
            if conflicts(a.declaration, a.covers, b.declaration, b.covers)
        )

    def clashes(self, option: Option, taken: Sequence[Option]) -> bool:
        """True when the option covers a slot that one of the taken ones covers, on a shape that both serve."""
        return any((option.key, other.key) in self._clashing for other in taken)

    def place_of(self, option: Option) -> Place:
        return next(place for place in self.places if option in place.options)

    def choices_for(
        self,
        used: Sequence[tuple[Option, Mapping[str, Value]]],
        settings: Mapping[str, Value],
        parallelism: PlanOf = AS_IT_IS,
    ) -> dict[str, str]:
        """Choices that give these parts, with these parameters (defaults where absent), these settings and this plan."""
        choices: dict[str, str] = {}
        for option, params in used:
            place = self.place_of(option)
            choices[place.name] = option.key
            choices |= {param_name(place, option, name): canonical_json(value) for name, value in params.items()}
        for dial in (*self.dials, *self.serving_dials):
            choices[dial.name] = canonical_json(settings.get(dial.setting.name, dial.setting.default))
        if len(self.plans) > 1:
            choices[PLAN] = canonical_json(dict(parallelism))
        return choices

    def _candidate(self, walk: Walk) -> Candidate:
        return make_candidate(walk.uses, walk.settings, self.dtype, walk.parallelism)


def make_candidate(
    uses: Sequence[PartUse], settings: Mapping[str, Value], dtype: str, parallelism: PlanOf = AS_IT_IS
) -> Candidate:
    """A candidate whose numerics class is the widest among its parts and settings, for a model of that declared dtype.

    Ranks that sum up what each of them has do so in another order, which is `tolerance`.
    """
    classes = [declaration(use.source).numerics_of(use.params, dtype) for use in uses]
    classes += [Numerics.TOLERANCE] if parallelism else []
    widest = max([numerics_of_settings(settings, dtype), *classes], key=lambda kind: kind.rank)
    return Candidate(parts=tuple(uses), settings=dict(settings), parallelism=dict(parallelism), numerics=widest)


def _is_inert(setting: Setting, taken: Sequence[Option]) -> bool:
    """Compiling the loaded forward does nothing when a part replaces the whole of it on every shape."""
    whole = any("model" in option.declaration.claims and option.declaration.domain == "True" for option in taken)
    return setting.name == "compile_mode" and whole


def _numbered(prefix: Sequence[int], asked: list[tuple[int, int]]) -> Suggest:
    """Answers by number: those of `prefix`, then the first of each; notes (number, how many) of every question."""

    def suggest(name: str, texts: tuple[str, ...]) -> str:
        index = prefix[len(asked)] if len(asked) < len(prefix) else 0
        asked.append((index, len(texts)))
        return texts[index]

    return suggest


def answers(choices: Choices) -> Suggest:
    def suggest(name: str, texts: tuple[str, ...]) -> str:
        text = choices.get(name, texts[0])
        if text not in texts:
            raise ValueError(f"{name}: {text!r} is not one of {texts}")
        return text

    return suggest


def param_name(place: Place, option: Option, param: str) -> str:
    return f"{place.name} / {option.key} / {param}"


def _catalogue_reason(source: PartSource, deployment: Deployment, compiler: bool) -> str | None:
    from search.catalogue import applicable

    return applicable(source, deployment, compiler=compiler)
