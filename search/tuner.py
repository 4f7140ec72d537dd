"""Numbers inside one composition: Optuna's Gaussian process over the parameters and settings of the incumbent, its parts fixed.

    incumbent ─► axes_of: parameters of its parts, settings ─► known values of candidates that differ in these alone ─► GP ─► choices

TPE composes parts, and draws each parameter by itself from a list of texts. Where the parts are settled and what is left is numbers
(tile sizes, threads, bits), order matters and axes interact: that is what a Gaussian process is for. Values of an axis that are numbers
are one axis by rank; others are categories. Each ask starts from what is known by then and from
its number, so a replayed search asks alike.

What is not here: which candidates are new and whose turn it is (`search.study`, `search.scheduler`).
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from hotpass.errors import InputError
from hotpass.records.candidate import Candidate
from search.space import PLAN, Choices, Space, answers
from search.trials import derive_seed

LEAST_KNOWN = 4
"""Values within the composition before the process says anything; until then what is untried is drawn by chance."""
MOST_KNOWN = 100
"""Best of them that it is fitted to: an ask takes about a second for so many."""
MAX_ASKS = 8
"""Known candidates in a row that it may suggest; each is then told once more as no better than the worst, so that it moves on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One question of a composition."""

    name: str
    """Of the choice."""
    texts: tuple[str, ...]
    """Its answers; numbers in ascending order."""
    is_ordered: bool

    @property
    def distribution(self) -> BaseDistribution:
        return IntDistribution(0, len(self.texts) - 1) if self.is_ordered else CategoricalDistribution(self.texts)

    def value_of(self, text: str) -> int | str:
        return self.texts.index(text) if self.is_ordered else text

    def text_of(self, value: int | str) -> str:
        return self.texts[int(value)] if self.is_ordered else str(value)


def axes_of(space: Space, base: Choices) -> list[Axis]:
    """Every parameter and setting that a walk with these choices asks for; which parts and which plan stay as they are."""
    fixed = {place.name for place in space.places} | {PLAN}
    found: list[Axis] = []
    answer = answers(base)

    def suggest(name: str, texts: tuple[str, ...]) -> str:
        if name not in fixed and len(texts) > 1:
            values = [json.loads(text) for text in texts]
            is_ordered = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
            ordered = tuple(sorted(texts, key=json.loads)) if is_ordered else texts
            found.append(Axis(name=name, texts=ordered, is_ordered=is_ordered))
        return answer(name, texts)

    space.walk(suggest, base)
    return found


class Tuner:
    """Of one search. Not safe to share between threads."""

    def __init__(self, seed: int) -> None:
        """`seed` is the campaign's. Raises InputError where what Optuna's process needs is not installed."""
        try:
            import scipy  # noqa: F401
        except ImportError:
            raise InputError("tuner", "gp", "needs scipy, which is not installed", "pip install scipy") from None
        self.seed = seed
        self._spent: set[str] = set()
        """Compositions (by their incumbent) in which nothing untried was found any more."""
        self._asks = Counter[str]()
        """By incumbent: each ask draws anew, also while nothing of the last ones is answered."""

    def may_ask(self, incumbent: Candidate) -> bool:
        """False once the incumbent's composition is used up."""
        return incumbent.id not in self._spent

    def ask(
        self,
        space: Space,
        incumbent: Candidate,
        values: Mapping[str, tuple[Choices, float]],
        is_new: Callable[[Choices], bool],
    ) -> Choices | None:
        """Choices that differ from the incumbent's in parameters and settings alone; None when none was found that is new.

        `values`: candidate id → its choices, and the log of its speedup over as loaded; those of other compositions are left out.
        `is_new` says of choices whether they may be asked.
        """
        base = space.choices_of(incumbent)
        axes = axes_of(space, base) if base is not None else []
        if base is None or not axes:
            self._spent.add(incumbent.id)
            return None
        names = {axis.name for axis in axes}
        within = [
            (choices, value)
            for choices, value in values.values()
            if {k: v for k, v in choices.items() if k not in names} == {k: v for k, v in base.items() if k not in names}
        ]
        within = sorted(within, key=lambda item: -item[1])[:MOST_KNOWN]
        self._asks[incumbent.id] += 1
        seed = derive_seed(self.seed, "tuner", incumbent.id, len(values), self._asks[incumbent.id])
        study = _study(axes, seed, within)
        for _ in range(MAX_ASKS):
            trial = study.ask({axis.name: axis.distribution for axis in axes})
            choices = {**base, **{axis.name: axis.text_of(trial.params[axis.name]) for axis in axes}}
            if is_new(choices):
                return choices
            study.tell(trial, min((value for _, value in within), default=0.0))
        self._spent.add(incumbent.id)
        return None


def _study(axes: list[Axis], seed: int, within: list[tuple[Choices, float]]) -> optuna.Study:
    """One that was told what is known."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=LEAST_KNOWN)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions = {axis.name: axis.distribution for axis in axes}
    for choices, value in within:
        params = {axis.name: axis.value_of(choices[axis.name]) for axis in axes}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    return study
