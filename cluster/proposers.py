"""The proposer of a campaign, from its plan and what its log remembers: for the loop, and again for a replay.

Nothing is looked up here but the parts that are given; two calls with the same arguments give proposers that draw alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.control import Controlled
from cluster.plan import Plan
from cluster.ports import Proposer
from cluster.proposing import StudyProposer
from cluster.state import SEARCHING, CampaignState
from hotpass.records.candidate import Candidate, Numerics, PartSource
from hotpass.records.slots import SlotTable
from search.objectives import parse_objectives
from search.scheduler import CONTROL, arm_of
from search.study import derive_seed


def proposer_of(
    plan: Plan,
    state: CampaignState,
    candidates: Mapping[str, Candidate],
    slots: SlotTable,
    parts: Sequence[PartSource],
    compiler: bool,
) -> Proposer:
    """Told every attempt of `state` in order. `candidates` by id: those of the campaign."""
    spec = plan.spec

    def made(sampler: str, seed: int) -> StudyProposer:
        return StudyProposer(
            plan.deployment,
            slots,
            parts,
            numerics=Numerics(spec.numerics),
            compiler=compiler,
            seed=seed,
            sampler=sampler,
            objectives=parse_objectives(spec.objective),
        )

    main = made(spec.sampler, spec.seed)
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
