"""The built-in proposer: each part once alone, what is one change away from a new incumbent, and Optuna's compositions.

Everything is enqueued into one `search.study.Study`, which never gives a candidate twice; a resumed campaign rebuilds it by telling
it the recorded attempts in order. A part that somebody else proposed joins the space once it was timed: a linked study takes over
what this one learned, and has the part once alone in the incumbent, since a new choice is otherwise drawn too rarely.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from cluster.predicting import REMEMBERED, by_promise, pairs_among
from cluster.warm import NOTHING, Warm
from costmodel.effects import fit_effects
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, PartSource, PartUse, Proposal
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Attempt, Tier
from hotpass.records.slots import SlotTable
from search.objectives import TOKENS_PER_S
from search.options import Option
from search.proposers import Proposer as Who
from search.proposers import Step, alone, neighbours, screening, serving_steps
from search.space import AS_IT_IS, PlanOf, Space
from search.study import Study
from search.tuner import Tuner

WARM_CANDIDATES = 5
"""Of an earlier campaign that are tried before anything else; their parts are in the catalogue either way."""


class StudyProposer:
    """Implements `cluster.ports.Proposer`."""

    def __init__(
        self,
        deployment: Deployment,
        slots: SlotTable,
        parts: Sequence[PartSource],
        *,
        numerics: Numerics,
        compiler: bool,
        seed: int,
        sampler: str = "optuna",
        objectives: Sequence[str] = (TOKENS_PER_S,),
        plans: Sequence[PlanOf] = (AS_IT_IS,),
        warm: Warm = NOTHING,
        tuner: str = "none",
        without: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`tuner`: `gp` for one beside the sampler (`search.tuner`), or `none`. `sampler` is `optuna`; `random`: by chance, no screening and no neighbours; or `none`: proposes nothing, and only keeps what
        is known."""
        self._build = partial(
            Space.build, deployment, slots, allowed=numerics, compiler=compiler, plans=plans, without=without
        )
        self._parts = tuple(parts)
        self._strangers: dict[str, str] = {}
        """Parts of others that cannot join the space (hash → why), so that none is tried twice."""
        self.space = self._build(self._parts)
        self._is_mute, self._learns = sampler == "none", sampler == "optuna"
        kind = "tpe" if self._learns else "random"
        self.study = Study(self.space, seed=seed, sampler=kind, objectives=objectives)
        self._tuner = Tuner(seed) if tuner != "none" else None
        self._incumbent = AS_LOADED
        self._around = AS_LOADED.id
        self._told: list[Attempt] = []
        self._known = {AS_LOADED.id: AS_LOADED}
        """What `_told` speaks of."""
        self._served: set[str] = {AS_LOADED.id}
        """Candidates that the slow tier has had, or will have."""
        if self._learns:
            self._enqueue_warm(warm)
            steps = screening(self.space, AS_LOADED)
            worth = {use.source.sha256: warm.worth_of(use.source.sha256) for use in _uses(self.space, steps)}
            steps.sort(key=lambda step: -max((worth[u.source.sha256] for u in _uses(self.space, [step])), default=0.0))
            self._enqueue(steps, Who.SCREENING, AS_LOADED)

    def seen(self, candidates: Iterable[Candidate]) -> None:
        """Candidates that others propose: never asked for here."""
        for candidate in candidates:
            self.study.seen(candidate)
            self._served.add(candidate.id)

    def drain_borrowed(self) -> Sequence[str]:
        """None: what others had measured is told to this one anyway."""
        return ()

    def sources(self) -> tuple[str, ...]:
        if self._is_mute:
            return ()
        sources = self.study.sources()
        # Where nothing is settled yet there is no composition to tune in.
        may_tune = self._tuner is not None and self._incumbent.parts and self._tuner.may_ask(self._incumbent)
        return (*sources, Who.TUNER.value) if may_tune else sources

    def follow(self, incumbent: Candidate) -> None:
        """What is near a new incumbent is enqueued."""
        self._incumbent = incumbent
        if incumbent.id != self._around:
            self._around = incumbent.id
            self.study.set_incumbent(incumbent)
            # Where only the serving loop's settings are new, each of these is known, and none is enqueued.
            if self._learns:
                self._enqueue(self._near(incumbent), Who.NEIGHBOUR, incumbent)

    def _near(self, incumbent: Candidate) -> list[Step]:
        """Its neighbours, the most promising first by what the attempts told so far have taught."""
        effects = fit_effects(pairs_among(self._told, self._known))
        steps = neighbours(self.space, incumbent)
        return by_promise(steps, lambda step: self.space.to_candidate(step.choices), effects, incumbent)

    def ask(self, incumbent: Candidate, source: str = "") -> Proposal | None:
        self.follow(incumbent)
        if source == Who.TUNER:
            self._tune()
        asked = self.study.ask(source)
        return asked.proposal if asked else None

    def _tune(self) -> None:
        """One candidate of the tuner is enqueued, as long as it finds one."""
        assert self._tuner is not None
        choices = self._tuner.ask(self.space, self._incumbent, self.study.timed(), self.study.may_ask)
        if choices is not None:
            said = "other numbers in the incumbent's parts, by those that were fast"
            self.study.enqueue(choices, proposer=Who.TUNER, hypothesis=said, parents=(self._incumbent.id,))

    def ask_serving(self, incumbent: Candidate) -> Proposal | None:
        if self._is_mute:
            return None
        for step in serving_steps(self.space, incumbent):
            candidate = self.space.to_candidate(step.choices)
            if candidate.id not in self._served:
                self._served.add(candidate.id)
                self.study.seen(candidate)
                return Proposal(
                    candidate=candidate, proposer=Who.SERVING, parents=(incumbent.id,), hypothesis=step.hypothesis
                )
        return None

    def tell(self, candidate: Candidate, attempt: Attempt) -> None:
        """An attempt of the search, of this session or an earlier one. A person's, against something that was never timed, only
        keeps the candidate from being proposed again."""
        self._told = [*self._told[-REMEMBERED:], attempt]
        self._known[candidate.id] = candidate
        if attempt.tier is Tier.SLOW:
            self._served.add(candidate.id)
        if attempt.verdict.is_timed and not self.study.can_chain(attempt.incumbent_id):
            self.study.seen(candidate)
            return
        joined = self._join(candidate) if attempt.verdict.is_timed and attempt.tier is Tier.FAST else []
        self.study.learn(candidate, attempt)
        for option in joined:
            choices = alone(self.space, option, self._incumbent)
            self.study.enqueue(
                choices,
                proposer=Who.NEWCOMER,
                hypothesis=f"{option.source.name}, proposed by others, within the incumbent",
                parents=(self._incumbent.id, candidate.id),
            )
        if self.study.is_long:
            self.study = self.study.extended(self.space)

    def give_up(self, candidate: Candidate) -> None:
        self.study.give_up(candidate.id)

    def _join(self, candidate: Candidate) -> list[Option]:
        """Parts of the candidate that the space lacked and now has."""
        known = {option.source.sha256 for option in self.space.options} | self._strangers.keys()
        new = {use.source.sha256: use.source for use in candidate.parts if use.source.sha256 not in known}
        if not new:
            return []
        space = self._build((*self._parts, *new.values()))
        found = [option for option in space.options if option.source.sha256 in new]
        admitted = {option.source.sha256 for option in found}
        self._strangers |= {sha: space.left_out.get(new[sha].name, "") for sha in new.keys() - admitted}
        if found:
            self._parts = (*self._parts, *(option.source for option in found))
            self.space = self._build(self._parts)
            self.study = self.study.extended(self.space)
        return [option for option in self.space.options if option.source.sha256 in admitted]

    @property
    def exhausted(self) -> str:
        """Why `ask` had nothing left; empty while it has."""
        return "nothing more was handed in" if self._is_mute else self.study.exhausted

    @property
    def broken(self) -> dict[str, str]:
        """Place or setting and the choice there → how its candidates failed."""
        return {f"{name}: {choice}": breaker.family for (name, choice), breaker in self.study.broken.items()}

    @property
    def random_state(self) -> str:
        """The study's seed, and how many candidates it knows: its draws are a function of both and of what it was told."""
        return f"{self.study.seed}:{self.study.num_known}"

    @property
    def space_version(self) -> str:
        return self.space.version

    @property
    def left_out(self) -> dict[str, str]:
        """Part or setting → why it is not in the space."""
        return dict(self.space.left_out)

    def _enqueue_warm(self, warm: Warm) -> None:
        """The fastest of an earlier campaign first, as far as this deployment admits them."""
        for candidate in warm.candidates[:WARM_CANDIDATES]:
            choices = self.space.choices_of(candidate)
            if choices is not None:
                said = f"{warm.worth[candidate.id]:.2f} times as fast as loaded in {warm.where}"
                self.study.enqueue(choices, proposer=Who.WARM, hypothesis=said)

    def _enqueue(self, steps: Sequence[Step], who: Who, parent: Candidate) -> None:
        for step in steps:
            self.study.enqueue(step.choices, proposer=who, hypothesis=step.hypothesis, parents=(parent.id,))


def _uses(space: Space, steps: Sequence[Step]) -> list[PartUse]:
    return [use for step in steps for use in space.to_candidate(step.choices).parts]
