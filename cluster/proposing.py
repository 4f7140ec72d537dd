"""The built-in proposer: each part once alone, then what is one change away from a new incumbent, then Optuna's compositions.

Everything is enqueued into one `search.study.Study`, which never gives a candidate twice; a resumed campaign rebuilds it by telling
it the recorded attempts in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, PartSource, Proposal
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Attempt, Tier
from hotpass.records.slots import SlotTable
from search.proposers import Proposer as Who
from search.proposers import Step, neighbours, screening, serving_steps
from search.space import Space
from search.study import Study


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
    ) -> None:
        self.space = Space.build(deployment, slots, parts, allowed=numerics, compiler=compiler)
        self.study = Study(self.space, seed=seed)
        self._around = AS_LOADED.id
        self._served: set[str] = {AS_LOADED.id}
        """Candidates that the slow tier has had, or will have."""
        self._enqueue(screening(self.space, AS_LOADED), Who.SCREENING, AS_LOADED)

    def seen(self, candidates: Iterable[Candidate]) -> None:
        """Candidates that others propose: never asked for here."""
        for candidate in candidates:
            self.study.seen(candidate)
            self._served.add(candidate.id)

    def ask(self, incumbent: Candidate) -> Proposal | None:
        if incumbent.id != self._around:
            self._around = incumbent.id
            self.study.set_incumbent(incumbent)
            # Where only the serving loop's settings are new, each of these is known, and none is enqueued.
            self._enqueue(neighbours(self.space, incumbent), Who.NEIGHBOUR, incumbent)
        asked = self.study.ask()
        return asked.proposal if asked else None

    def ask_serving(self, incumbent: Candidate) -> Proposal | None:
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
        if attempt.tier is Tier.SLOW:
            self._served.add(candidate.id)
        if attempt.verdict.is_timed and attempt.incumbent_id not in self.study.values:
            self.study.seen(candidate)
        else:
            self.study.learn(candidate, attempt)

    @property
    def exhausted(self) -> str:
        """Why `ask` had nothing left; empty while it has."""
        return self.study.exhausted

    @property
    def broken(self) -> dict[str, str]:
        """Place or setting and the choice there → how its candidates failed."""
        return {f"{name}: {choice}": breaker.family for (name, choice), breaker in self.study.broken.items()}

    @property
    def random_state(self) -> str:
        """The study's seed, and how many candidates it knows: its draws are a function of both and of what it was told."""
        return f"{self.study.seed}:{self.study.num_known}"

    @property
    def left_out(self) -> dict[str, str]:
        """Part or setting → why it is not in the space."""
        return dict(self.space.left_out)

    def _enqueue(self, steps: Sequence[Step], who: Who, parent: Candidate) -> None:
        for step in steps:
            self.study.enqueue(step.choices, proposer=who, hypothesis=step.hypothesis, parents=(parent.id,))
