"""Where a campaign stands, for `hotpass status`: engines and what they do, queue, best, what was spent and by whom, what was rejected
and why. Everything is read from the folded log, while it runs too; nothing is measured and nothing is locked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.events import writer_of
from cluster.front import search_front
from cluster.journal import FOLDER, read_state
from cluster.live import clock_text, span
from cluster.plan import Plan, read_plan
from cluster.rules import tau_between_tiers
from cluster.state import AttemptRow, CampaignState
from hotpass.records.measurement import Verdict
from search.agents.spend import LlmSpend
from search.objectives import parse_objectives
from search.scheduler import arm_of

REASONS = 12
"""Reasons of rejection that are listed, the most frequent first."""


def standing_of(folder: Path) -> dict[str, Any]:
    """As plain values; `hotpass status --json` prints them. Raises InputError for a folder that holds no campaign."""
    plan, state = read_plan(folder), read_state(folder)
    writer = writer_of(folder / FOLDER)
    best, leading = state.best(), state.best_so_far()
    tau, pairs = tau_between_tiers(state)
    return {
        "campaign": plan.campaign,
        "status": "done" if state.result else "running" if writer else "stopped",
        "process": writer,
        "attempts": state.tally.attempts,
        "attempts_per_hour": state.attempts_per_hour(),
        "elapsed_seconds": state.elapsed_seconds,
        "budget_seconds": plan.spec.budget_seconds,
        "best": best.attempt.candidate_id if best else None,
        "leading": leading.attempt.candidate_id if leading else None,
        "label": state.label_of(leading.attempt.candidate_id) if leading else None,
        "speedup_vs_loaded": leading.speedup_vs_loaded if leading else None,
        "engines": engines_of(state) if writer else [],
        "queue": queue_of(state),
        "spend": spend_of(state),
        "proposers": proposers_of(state),
        "rejected": rejected_by_reason(state),
        "tau_between_tiers": tau,
        "tau_pairs": pairs,
        "front": front_standing(plan, state),
        "stop_reason": state.stop_reason,
        "last_seq": state.last_seq,
    }


def standing_lines(standing: dict[str, Any], plan: Plan) -> Iterator[str]:
    """The same for people."""
    head = {"running": f"running (process {standing['process']})", "stopped": "stopped, resumable"}
    spent = f"{clock_text(standing['elapsed_seconds'])} of {clock_text(plan.spec.budget_seconds)}"
    rate = f"{standing['attempts']} attempts ({standing['attempts_per_hour']:.0f}/h)"
    yield f"{head.get(standing['status'], standing['status'])} · {spent} · {rate}"
    if standing["leading"]:
        claim = "best" if standing["best"] else "leading, not measured cold yet"
        yield f"  {claim}: {span(standing['speedup_vs_loaded'])} {standing['label']} ({standing['leading'][:10]})"
    for member in standing["front"]:
        ratios = ", ".join(f"{name} {ratio:.2f} ×" for name, ratio in member["ratios"].items())
        yield f"  on the front, {member['purpose']}: {ratios} {member['label']} ({member['candidate'][:10]})"
    for engine in standing["engines"]:
        yield f"  engine {engine['name']}: {engine['doing']}"
    waiting = ", ".join(f"{count} {arm}" for arm, count in standing["queue"].items()) or "nothing"
    yield f"  waiting to be measured: {waiting}"
    spend = standing["spend"]
    llm = f"{spend['llm_tokens']:,} LLM tokens, {spend['llm_usd']:.2f} USD" if spend["llm_calls"] else "no LLM"
    yield f"  spent: {spend['engine_seconds']:.0f} engine seconds, {llm}"
    for arm in standing["proposers"]:
        gain = f"{arm['gain_per_engine_hour']:.2f} log gain per engine hour"
        yield f"  {arm['name']}: {arm['attempts']} attempts, {arm['engine_seconds']:.0f} engine seconds, {gain}"
    for reason in standing["rejected"]:
        yield f"  {reason['count']} {reason['verdict']}: {reason['reason']}"
    if standing["stop_reason"]:
        yield f"  the search ended: {standing['stop_reason']}"


def front_standing(plan: Plan, state: CampaignState) -> list[dict[str, Any]]:
    """Of two objectives: the front that was measured cold, else that of the search, point estimates; nothing with one."""
    objectives = parse_objectives(plan.spec.objective)
    if len(objectives) < 2:
        return []
    if state.front is not None:
        purpose, found = (
            "cold",
            {
                member["candidate_id"]: [float(member["spans"][name]["value"]) for name in objectives]
                for member in state.front
            },
        )
    else:
        purpose, found = "search", {key: list(ratios) for key, ratios in search_front(state, objectives).items()}
    return [
        {
            "candidate": key,
            "label": state.label_of(key),
            "purpose": purpose,
            "ratios": dict(zip(objectives, ratios, strict=True)),
        }
        for key, ratios in found.items()
    ]


def engines_of(state: CampaignState) -> list[dict[str, Any]]:
    """Each engine of the present session and its open order, as the log has it."""
    doing = {
        order.engine: f"{order.purpose} · {order.tier} · {state.label_of(order.candidate_id)}"
        for order in state.open_orders.values()
        if order.session == state.decisions["start"]
    }
    names = [str(engine.get("engine", "")) for engine in state.start.get("engines", ())]
    return [{"name": name, "doing": doing.get(name, "idle")} for name in names]


def queue_of(state: CampaignState) -> dict[str, int]:
    """Proposals that no engine has had, by proposer."""
    under_way = {order.candidate_id for order in state.open_orders.values()}
    waiting = Counter(
        arm_of(info.proposer)
        for key, info in state.candidates.items()
        if key not in state.by_candidate
        and key not in under_way
        and not (key in state.predictions and state.predictions[key].decision == "prune")
    )
    return dict(waiting.most_common())


def spend_of(state: CampaignState) -> dict[str, Any]:
    """Engine time of the search, and what agents' LLMs took."""
    llm = LlmSpend()
    parts = list(state.llm_spend.values())
    return {
        "engine_seconds": state.tally.engine_seconds,
        "llm_calls": sum((spend.calls for spend in parts), llm.calls),
        "llm_tokens": sum(spend.tokens for spend in parts),
        "llm_usd": sum(spend.usd for spend in parts),
        "llm_unpriced_tokens": sum(spend.unpriced_tokens for spend in parts),
    }


def proposers_of(state: CampaignState) -> list[dict[str, Any]]:
    """What each proposer used and earned, the most expensive first."""
    return [
        {
            "name": name,
            "attempts": arm.attempts,
            "engine_seconds": arm.seconds,
            "gain_per_engine_hour": arm.gain / arm.seconds * 3600 if arm.seconds else 0.0,
        }
        for name, arm in sorted(state.shares.arms.items(), key=lambda item: -item[1].seconds)
    ]


def rejected_by_reason(state: CampaignState) -> list[dict[str, Any]]:
    """Verdicts that cannot be used, with reasons that read alike but for numbers counted together."""
    counts = Counter(
        (row.attempt.verdict.value, family(row))
        for row in state.search_attempts()
        if row.attempt.verdict is not Verdict.FASTER
    )
    return [
        {"verdict": verdict, "reason": reason, "count": count}
        for (verdict, reason), count in counts.most_common(REASONS)
    ]


def family(row: AttemptRow) -> str:
    """Its reason without numbers; what was timed has one reason, whatever the sentence says."""
    if row.attempt.verdict.is_timed:
        return "measured"
    return re.sub(r"[0-9]+(?:[.][0-9]+)?(?:e[-+]?[0-9]+)?", "#", row.attempt.reason)[:100]
