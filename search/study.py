"""Optuna as a sampler of choices: ask for a candidate that is new, tell what its attempt came to.

    enqueue(choices) ─┐
    sampler (TPE) ────┴► ask ─► Ask(candidate, choices) ─► … measured elsewhere … ─► tell(attempt) ─► sampler

The study never gives the same candidate twice: it keeps an index of candidate ids, whatever their trials are called. What it maximises
are the values of `search.values`, by the objectives that the user names. Optuna's own side of it is `search.trials`.

What is not here: whose turn it is (`cluster.loop`), when to stop (`search.budget`), and durability: a study is rebuilt from the ledger
(`seen`, `tell`), in the order of the log.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import TrialState

from hotpass.records.candidate import AS_LOADED, Candidate, Proposal
from hotpass.records.measurement import Attempt, Purpose, Tier, Verdict
from search.objectives import TOKENS_PER_S
from search.policy import Breaker, breakers
from search.proposers import Proposer, lowest_tier, on_fixed_shapes, turn_of
from search.space import NO_CHOICES, Choices, Space, param_name
from search.trials import asked_of, derive_seed, fresh_study, sampler_of
from search.values import Values

MAX_CARRIED = 300
"""Trials that an extended study takes over: more make `ask` slow, and old ones say little."""
MAX_TRIALS = 600
"""Finished trials after which a study is renewed with its best ones, so that `ask` stays quick in a long campaign."""
SAMPLERS = ("tpe", "random")
MAX_ASKS = 4
"""Duplicates from the sampler in a row before chance takes over."""
MAX_DRAWS = 200
"""Random draws before a large space counts as exhausted (a small one is gone through)."""
REMEMBERED = 1000
"""Latest attempts among which families of equal failures are looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What the study wants measured next."""

    proposal: Proposal
    choices: Choices
    trial: int
    """Number of the Optuna trial that waits for the answer."""

    @property
    def candidate(self) -> Candidate:
        return self.proposal.candidate


class Study:
    """One sampler over one space. Not safe to share between threads; only the controller holds it."""

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        storage: str | None = None,
        name: str = "hotpass",
        previous: str = "",
        startup_trials: int = 10,
        sampler: str = "tpe",
        objectives: Sequence[str] = (TOKENS_PER_S,),
    ) -> None:
        """`seed` is the campaign's; the sampler's own is derived from it and the space's version, and recorded. `sampler` is `tpe`, or
        `random`: untried candidates by chance, without Optuna. `objectives`: of `search.objectives`, the first orders candidates.

        `storage` is an Optuna URL for looking at the study with its own tools; None keeps it in memory. `previous` names the study
        that this one extends.
        """
        self.space = space
        self.sampler = sampler
        self.objectives = tuple(objectives)
        self.seed = derive_seed(seed, "study", space.version)
        self.exhausted = ""
        """Why the last `ask` had nothing left, else empty."""
        self._campaign_seed = seed
        self._storage = storage
        self._startup_trials = startup_trials
        self._rng = random.Random(self.seed)
        self._base: Choices = NO_CHOICES
        self._known: dict[str, Candidate] = {AS_LOADED.id: AS_LOADED}
        self._on_fixed_shapes: set[str] = {on_fixed_shapes(AS_LOADED)}
        self._running: dict[str, int] = {}
        self._choices_of: dict[str, Choices | None] = {}
        self._worth = Values(self.objectives)
        self._finished = 0
        self._waiting: list[tuple[Choices, Proposal]] = []
        self._attempts: deque[Attempt] = deque(maxlen=REMEMBERED)
        self.broken: dict[tuple[str, str], Breaker] = {}
        """Choices that are not tried any more, and why."""
        self._study = fresh_study(
            f"{name}-{space.version}",
            storage,
            seed=self.seed,
            startup_trials=startup_trials,
            num_values=len(self.objectives),
        )
        self._study.set_user_attr("seed", self.seed)
        self._study.set_user_attr("space_version", space.version)
        self._study.set_user_attr("previous_study", previous)

    @property
    def name(self) -> str:
        return str(self._study.study_name)

    @property
    def num_known(self) -> int:
        """Candidates that were asked, enqueued or seen, as loaded among them."""
        return len(self._known)

    def can_chain(self, candidate_id: str) -> bool:
        """Whether attempts against this one have a value."""
        return self._worth.can_chain(candidate_id)

    @property
    def values(self) -> Mapping[str, float]:
        """Candidate id → log of the speedup over as loaded, of everything that was timed."""
        return self._worth.leading

    def timed(self) -> dict[str, tuple[Choices, float]]:
        """Candidate id → its choices in this space, and its value by the first objective; what lies outside of the space is left out."""
        found = {}
        for key, value in self.values.items():
            if key not in self._choices_of:
                known = self._known.get(key)
                self._choices_of[key] = self.space.choices_of(known) if known else None
            choices = self._choices_of[key]
            if choices is not None:
                found[key] = (choices, value)
        return found

    def may_ask(self, choices: Choices) -> bool:
        """Whether these choices are new, admitted and not given up."""
        return self._is_new(self.space.to_candidate(choices), choices)

    def knows(self, candidate: Candidate) -> bool:
        """True when it, or one that differs in settings of the serving loop alone, was asked, enqueued or seen before."""
        return candidate.id in self._known or on_fixed_shapes(candidate) in self._on_fixed_shapes

    def seen(self, candidate: Candidate) -> None:
        """A candidate proposed elsewhere (a person, an agent, an earlier run): never ask for it, also if it waits to be asked."""
        self._remember(candidate)
        key = on_fixed_shapes(candidate)
        self._waiting = [item for item in self._waiting if on_fixed_shapes(item[1].candidate) != key]

    def anchor(self, candidate_id: str, other: Study) -> None:
        """A candidate that this study never had, as something that others are chained to: its values are those of another study."""
        self._worth.anchor(candidate_id, other._worth)

    def set_incumbent(self, candidate: Candidate) -> None:
        """Settings of the serving loop in later asks are those of this candidate."""
        self._base = self.space.choices_of(candidate) or NO_CHOICES

    def enqueue(self, choices: Choices, *, proposer: str, hypothesis: str = "", parents: Iterable[str] = ()) -> bool:
        """Have these choices asked before any of the sampler's, by `turn_of` their proposer and then in the order of the calls.

        False when the candidate is known, banned or not admitted.
        """
        candidate = self.space.to_candidate(choices)
        if self.knows(candidate) or self._is_banned(choices) or not self.space.admits(candidate):
            return False
        self._remember(candidate)
        proposal = Proposal(candidate=candidate, proposer=proposer, hypothesis=hypothesis, parents=tuple(parents))
        self._waiting.append((choices, proposal))
        self._waiting.sort(key=lambda item: turn_of(item[1].proposer))  # stable: equal turns keep their order
        return True

    def sources(self) -> tuple[str, ...]:
        """Who has something to ask, in the order of `turn_of`: proposers of enqueued choices, then the sampler.

        The sampler has, once it has seen enough values to go by, or when nothing else waits.
        """
        enqueued = tuple(dict.fromkeys(proposal.proposer for _, proposal in self._waiting))
        may_sample = not self.exhausted and (not enqueued or len(self.values) > self._startup_trials)
        return (*enqueued, Proposer.OPTUNA.value) if may_sample else enqueued

    def ask(self, source: str = "") -> Ask | None:
        """A candidate that was never asked before, or None when there is none (`exhausted` says why).

        With a `source` of `sources()` only from there: then None says that this one has nothing any more.
        """
        for item in list(self._waiting):
            choices, proposal = item
            if source in ("", proposal.proposer):
                self._waiting.remove(item)
                if not self._is_banned(choices):
                    return self._asked(proposal, choices)
        if source not in ("", Proposer.OPTUNA):
            return None
        return self._sampled() if self.sampler == "tpe" else self._untried()

    def _sampled(self) -> Ask | None:
        for _ in range(MAX_ASKS):
            trial = self._study.ask()
            walk = self.space.walk(sampler_of(trial), self._base)
            candidate = self.space.to_candidate(walk.choices)
            if self._is_new(candidate, walk.choices):
                proposal = Proposal(
                    candidate=candidate, proposer=Proposer.OPTUNA, hypothesis="composed from what was fast so far"
                )
                self._remember(candidate)
                self._running[candidate.id] = trial.number
                return Ask(proposal=proposal, choices=walk.choices, trial=trial.number)
            # Pruned, not failed: a sampler that forgets what it suggested suggests it again and again (measured: 11 of 60 asks
            # came from it then, 46 so), and a second value for the same candidate would draw it there even more.
            self._study.tell(trial.number, state=TrialState.PRUNED)
        return self._untried()

    def tell(self, attempt: Attempt) -> float | None:
        """Take an attempt in; returns the value it gave the candidate, None when it has none.

        The fast tier's value stays once there is one. A candidate that failed or was incorrect is pruned without a value, which
        keeps the sampler away from it; an invalid attempt says nothing about the candidate, and is failed. A family of equal failures
        ends what they have in common (`broken`). Raises ValueError when the attempt's incumbent never had a value.
        """
        values = self._worth.take(attempt, is_one_with_incumbent=self._is_one_with_incumbent(attempt))
        trial = self._running.pop(attempt.candidate_id, None)
        if trial is not None and trial >= 0:
            self._finished += 1
            if values:
                self._study.tell(trial, list(values), skip_if_finished=True)
            else:
                at_fault = attempt.verdict in (Verdict.FAILED, Verdict.INCORRECT)
                self._study.tell(trial, state=TrialState.PRUNED if at_fault else TrialState.FAIL, skip_if_finished=True)
        self._attempts.append(attempt)
        if attempt.verdict in (Verdict.FAILED, Verdict.INCORRECT):
            for breaker in breakers(self._attempts, self._known):
                self._break(breaker)
        return values[0] if values else None

    def give_up(self, candidate_id: str) -> None:
        """The measurement of an asked candidate never came back (a dead engine, an expired lease): its trial fails, once."""
        trial = self._running.pop(candidate_id, None)
        if trial is not None and trial >= 0:
            self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)

    def learn(self, candidate: Candidate, attempt: Attempt) -> None:
        """An attempt of another session on a candidate that this study did not ask for, as if it had been asked."""
        self.seen(candidate)
        choices = self.space.choices_of(candidate)
        searched = attempt.purpose in (Purpose.SEARCH, Purpose.REMEASURE) and attempt.tier is Tier.FAST
        if (
            choices is not None
            and searched
            and candidate.id not in self._running
            and not self._worth.is_fast(candidate.id)
        ):
            self._enter(choices, candidate.id)
        self.tell(attempt)

    def extended(self, space: Space) -> Study:
        """A study over a larger (or smaller) space that carries over what this one learned, at most `MAX_CARRIED` trials.

        What waits to be asked, and what is being measured, stays known; the caller enqueues the new parts.
        """
        study = Study(
            space,
            seed=self._campaign_seed,
            storage=self._storage,
            name=self.name.rsplit("-", 1)[0],
            previous=self.name,
            startup_trials=self._startup_trials,
            sampler=self.sampler,
            objectives=self.objectives,
        )
        study._base = self._base
        study._known |= self._known
        study._on_fixed_shapes |= self._on_fixed_shapes
        study._worth.update(self._worth)
        study._attempts.extend(self._attempts)
        for breaker in self.broken.values():
            study._break(breaker)
        best_first = sorted(self.values.items(), key=lambda item: -item[1])
        for candidate_id, _ in best_first[:MAX_CARRIED]:
            choices = space.choices_of(self._known[candidate_id]) if candidate_id in self._known else None
            if choices is not None:
                params, distributions = asked_of(space, choices)
                values = list(self._worth.every[candidate_id])
                study._study.add_trial(
                    optuna.trial.create_trial(params=params, distributions=distributions, values=values)
                )
                study._finished += 1
        for _, proposal in self._waiting:
            again = space.choices_of(proposal.candidate)
            if again is not None:
                study._waiting.append((again, proposal))
        for candidate_id in self._running:
            choices = space.choices_of(self._known[candidate_id])
            if choices is not None:
                study._enter(choices, candidate_id)
        return study

    @property
    def is_long(self) -> bool:
        """Whether it has so many trials that it should be renewed: `extended` over its own space."""
        return self._finished > MAX_TRIALS

    def _is_one_with_incumbent(self, attempt: Attempt) -> bool:
        """Whether the two differ in settings of the serving loop alone."""
        known, incumbent = self._known.get(attempt.candidate_id), self._known.get(attempt.incumbent_id)
        if known is None or incumbent is None or known.id == incumbent.id:
            return False
        return lowest_tier(known, incumbent) is Tier.SLOW

    def _is_new(self, candidate: Candidate, choices: Choices) -> bool:
        return not self.knows(candidate) and self.space.admits(candidate) and not self._is_banned(choices)

    def _remember(self, candidate: Candidate) -> None:
        self._known.setdefault(candidate.id, candidate)
        self._on_fixed_shapes.add(on_fixed_shapes(candidate))

    def _break(self, breaker: Breaker) -> None:
        """Never ask for this choice again."""
        choice = (f"set {breaker.name}", breaker.value_json)
        if breaker.part_sha256:
            option = next((o for o in self.space.options if o.source.sha256 == breaker.part_sha256), None)
            if option is None:
                return
            place = self.space.place_of(option)
            whole = (place.name, option.key)
            choice = (param_name(place, option, breaker.name), breaker.value_json) if breaker.name else whole
        self.broken.setdefault(choice, breaker)

    def _is_banned(self, choices: Choices) -> bool:
        return any(item in self.broken for item in choices.items())

    def _untried(self) -> Ask | None:
        """By chance among what is untried; then a small space is gone through, so that its end is certain."""
        size = self.space.size()
        drawn = (self.space.sample(self._rng, self._base) for _ in range(MAX_DRAWS))
        for choices in itertools.chain(drawn, () if size.is_bound else self.space.every(self._base)):
            candidate = self.space.to_candidate(choices)
            if self._is_new(candidate, choices):
                self._remember(candidate)
                proposal = Proposal(
                    candidate=candidate, proposer=Proposer.RANDOM, hypothesis="untried, drawn by chance"
                )
                return self._asked(proposal, choices)
        self.exhausted = (
            f"space exhausted: {MAX_DRAWS} draws from at most {size.candidates} candidates found nothing untried"
            if size.is_bound
            else f"space exhausted: all {size.candidates} candidates are tried{' or given up' if self.broken else ''}"
        )
        return None

    def _asked(self, proposal: Proposal, choices: Choices) -> Ask:
        trial = self._enter(choices, proposal.candidate.id)
        return Ask(proposal=proposal, choices=choices, trial=trial)

    def _enter(self, choices: Choices, candidate_id: str) -> int:
        """A running trial with exactly these choices; without a sampler that learns there is none, and its number is -1."""
        if self.sampler != "tpe":
            self._running[candidate_id] = -1
            return -1
        self._study.enqueue_trial(asked_of(self.space, choices)[0])
        trial = self._study.ask()
        self.space.walk(sampler_of(trial), choices)
        self._running[candidate_id] = trial.number
        return int(trial.number)
