"""`hotpass compare DIR…`: how campaigns differ, and their winners side by side where that means something.

    campaigns ─► differences of deployment and environment ─► same deployment, same machine? ─► one session: each winner cold against
                                                              as loaded, and each later winner against the first
                                                          └─► else "not comparable", with the reason

Ratios of two campaigns are never divided by each other: what is compared was measured in one session, interleaved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.campaign import Running, opened_journal, opened_session
from cluster.folder import all_candidates
from cluster.journal import read_state
from cluster.plan import Plan, read_plan
from cluster.state import CampaignState
from hotpass.decode import json_safe
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate, Proposal
from hotpass.records.measurement import Attempt, Purpose
from search.proposers import lowest_tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A campaign that takes part."""

    folder: Path
    plan: Plan
    state: CampaignState
    winner: Candidate | None
    """None where nothing was proven faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two winners, or one and as loaded, measured in one session."""

    candidate: str
    """Folder of the campaign whose winner it is."""
    over: str
    """`as loaded`, or the folder of the other one."""
    attempt: Attempt


def read_campaigns(folders: Sequence[Path]) -> list[Compared]:
    """Raises InputError for a folder that holds no campaign, or fewer than two."""
    if len(folders) < 2:
        raise InputError("compare", ", ".join(map(str, folders)), "is one campaign", "give two or more folders")
    found = []
    for folder in folders:
        plan, state = read_plan(folder), read_state(folder)
        best = state.best()
        winner = all_candidates(folder)[best.attempt.candidate_id] if best else None
        found.append(Compared(folder=folder, plan=plan, state=state, winner=winner))
    return found


def differences(first: Compared, other: Compared) -> dict[str, tuple[Any, Any]]:
    """Field → both values, of deployment, specification, versions and measured environment."""
    here, there = (dict(_facts(item)) for item in (first, other))
    return {
        name: (here.get(name), there.get(name)) for name in sorted({*here, *there}) if here.get(name) != there.get(name)
    }


def why_not_comparable(campaigns: Sequence[Compared]) -> str:
    """Empty when the winners can be measured in one session, else the first reason."""
    first = campaigns[0]
    for other in campaigns[1:]:
        if other.plan.deployment.id != first.plan.deployment.id:
            names = [name for name in differences(first, other) if name.startswith("deployment.")]
            return f"not comparable: {other.folder} is of another deployment ({', '.join(names[:6])})"
        if other.plan.spec.engine != first.plan.spec.engine:
            return f"not comparable: {other.folder} ran on the {other.plan.spec.engine} engine"
    if not any(campaign.winner for campaign in campaigns):
        return "not comparable: none of them has a winner"
    return ""


def measure_winners(running: Running, campaigns: Sequence[Compared]) -> list[Pair]:
    """In one session: each winner cold against as loaded, each later one against the first. `running`: where it is recorded."""
    winners = [(str(campaign.folder), campaign.winner) for campaign in campaigns if campaign.winner is not None]
    pairs: list[Pair] = []
    with opened_journal(running) as journal, opened_session(running, journal) as (session, machines):

        def measured(name: str, candidate: Candidate, over: str, incumbent: Candidate) -> None:
            built = machines.builder.submit(candidate).result()
            if built.failure is not None:
                attempt = session.fail_build(candidate, incumbent, built.failure).attempt
            else:
                tier = lowest_tier(candidate, incumbent)
                order = session.order(session.engines[0], incumbent, candidate, tier, Purpose.COLD)
                attempt = session.settle(order, order.future.result()).attempt
            pairs.append(Pair(candidate=name, over=over, attempt=attempt))

        for name, candidate in winners:
            session.keep(candidate)
            session.journal.propose(Proposal(candidate=candidate, proposer="compare", hypothesis=f"won {name}"))
            measured(name, candidate, "as loaded", AS_LOADED)
        for name, candidate in winners[1:]:
            if candidate.id != winners[0][1].id:
                measured(name, candidate, winners[0][0], winners[0][1])
    return pairs


def compare_plan(first: Plan, out: Path) -> Plan:
    """The first campaign's deployment, for a folder of its own."""
    spec = dataclasses.replace(first.spec, out=str(out), baselines=False, continue_from="", warm_start="")
    return dataclasses.replace(first, campaign=out.name, spec=spec, continued=None, command=(), notes=())


def _facts(campaign: Compared) -> Iterator[tuple[str, Any]]:
    plan = json_safe(campaign.plan)
    yield from _flat("deployment", plan["deployment"])
    spec = {name: value for name, value in plan["spec"].items() if name not in ("out", "seed", "model", "traffic")}
    yield from _flat("spec", spec)
    yield from _flat("versions", plan["versions"])
    own = [row for row in campaign.state.attempts if row.attempt.purpose is Purpose.AA]
    if own:
        measured = campaign.state.results.get(own[-1].assignment, {})
        yield from _flat("environment", measured.get("environment", {}))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    else:
        yield name, value
