"""The proposer of a campaign, from its plan and what its log remembers: for the loop, and again for a replay.

Nothing is looked up here but the parts that are given; two calls with the same arguments give proposers that draw alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.control import Controlled
from cluster.plan import Plan, settings_left_out
from cluster.ports import Proposer
from cluster.proposing import StudyProposer
from cluster.state import SEARCHING, CampaignState
from cluster.warm import NOTHING, Warm, with_parts
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, PartSource, Proposal
from hotpass.records.slots import SlotTable
from search.objectives import parse_objectives
from search.scheduler import CONTROL, arm_of
from search.trials import derive_seed


def proposer_of(
    plan: Plan,
    state: CampaignState,
    candidates: Mapping[str, Candidate],
    slots: SlotTable,
    parts: Sequence[PartSource],
    compiler: bool,
    warm: Warm = NOTHING,
) -> Proposer:
    """Told every attempt of `state` in order. `candidates` by id: those of the campaign; `parts`: the catalogue."""
    spec = plan.spec

    def made(sampler: str, seed: int, tuner: str = "none") -> StudyProposer:
        return StudyProposer(
            plan.deployment,
            slots,
            with_parts(parts, warm),
            numerics=Numerics(spec.numerics),
            compiler=compiler,
            seed=seed,
            sampler=sampler,
            objectives=parse_objectives(spec.objective),
            plans=plan.plans,
            warm=warm,
            tuner=tuner,
            without=settings_left_out(spec),
        )

    main = made(spec.sampler, spec.seed, spec.tuner)
    proposer: Proposer = main
    if spec.control != "none":
        mine = [key for key, info in state.candidates.items() if arm_of(info.proposer) == CONTROL]
        control = made(spec.control, derive_seed(spec.seed, CONTROL))
        proposer = Controlled(main, control, spec.control, [*mine, *state.borrowed])
    for row in state.attempts:
        if row.attempt.purpose in SEARCHING and row.attempt.candidate_id in candidates:
            proposer.tell(candidates[row.attempt.candidate_id], row.attempt)
    proposer.drain_borrowed()
    return proposer


def unfinished(plan: Plan, state: CampaignState, candidates: Mapping[str, Candidate]) -> dict[str, Proposal]:
    """What is measured first: the winner of the campaign that this one continues, then proposals without an attempt."""
    found: dict[str, Proposal] = {}
    tried = set(state.by_candidate)
    continued = plan.continued
    if continued and continued.candidate.id not in tried | {AS_LOADED.id}:
        hypothesis = f"won on {continued.traffic}"
        found[continued.candidate.id] = Proposal(
            candidate=continued.candidate, proposer="continued", hypothesis=hypothesis
        )
    for candidate_id, info in state.candidates.items():
        candidate = candidates.get(candidate_id)
        if candidate is not None and candidate_id not in tried:
            found[candidate_id] = Proposal(
                candidate=candidate, proposer=info.proposer, parents=info.parents, hypothesis=info.hypothesis
            )
    return found
