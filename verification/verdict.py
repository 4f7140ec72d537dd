"""From a measured result to a verdict with its reason. Pure: the same result, policy and band give the same attempt.

The order of questions is fixed, so that a candidate is rejected for the gravest thing that is true of it:
did it finish · was its output right · did it run at all · did it leave the engine as it was · is the time possible · is it faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hotpass.records.candidate import AS_LOADED, Candidate, Numerics
from hotpass.records.measurement import (
    Attempt,
    Estimate,
    FailureKind,
    MeasuredBlock,
    MeasureResult,
    Purpose,
    Side,
    Tier,
    Verdict,
)
from hotpass.records.shapes import ShapeTable
from hotpass.stats import SequentialTest, speedup_of_replays
from verification.handover import wrong_for_others
from verification.numerics import Band, Finding, loaded_checks, reference_checks, right_for_class, summary
from verification.policy import Policy
from verification.tiers import Speed, speed_of

DISTURBED = "incumbent disturbed"
CLOCKS = "clocks disagree"
"""How the reason begins when an attempt is invalid by what went on beside it: rejections that a second look may lift."""


def judge(
    result: MeasureResult,
    *,
    policy: Policy,
    band: Band,
    shapes: ShapeTable,
    num_layers: int,
    floors_ms: Mapping[str, float] | None = None,
) -> Attempt:
    """The attempt that a result amounts to. `floors_ms` maps `ShapeRow.key` to the physical floor of a step of the whole model, ms."""
    rejected = (
        _failed(result)
        or _understated(result)
        or _forbidden(result.assignment.candidate, policy)
        or _incorrect(result, band, policy)
        or _never_ran(result)
        or _left_behind(result)
        or _disturbed(result, policy)
        or _clock(result, policy)
        or _impossible(result, policy, floors_ms or {}, num_layers)
    )
    if rejected is not None:
        return _attempt(result, *rejected)
    if result.assignment.tier is Tier.SLOW and result.replays:
        return _by_replay(result)
    if result.at_most:
        return _far_behind(result)
    return _by_blocks(result, shapes, num_layers)


def _failed(result: MeasureResult) -> tuple[Verdict, str] | None:
    if result.failure is None:
        return None
    if result.failure.kind is FailureKind.DISTURBED:
        return Verdict.INVALID, f"{DISTURBED}: {result.failure.message}"
    return Verdict.FAILED, f"{result.failure.kind}: {result.failure.message}"


def _understated(result: MeasureResult) -> tuple[Verdict, str] | None:
    """A scheduler that believed the declaration would have put the candidate where its reload does harm."""
    for report in result.reloads:
        if report.side is Side.CANDIDATE and report.understated:
            return Verdict.INVALID, f"its reload is declared {report.declared} and needs {report.actual}"
    return None


def _forbidden(candidate: Candidate, policy: Policy) -> tuple[Verdict, str] | None:
    if policy.numerics.allows(candidate.numerics):
        return None
    return Verdict.INVALID, f"numerics class {candidate.numerics} is wider than the policy's {policy.numerics}"


def _incorrect(result: MeasureResult, band: Band, policy: Policy) -> tuple[Verdict, str] | None:
    finding = correctness(result, band, policy)
    if finding.ok:
        return None
    kind = Verdict.INVALID if finding.evidence.startswith("no output") else Verdict.INCORRECT
    return kind, finding.evidence


def correctness(result: MeasureResult, band: Band, policy: Policy) -> Finding:
    """Right for the candidate's class on everything that was compared, and enough was."""
    finding = _in_windows(result, band, policy)
    return (wrong_for_others(result, band, policy) or finding) if finding.ok else finding


def _in_windows(result: MeasureResult, band: Band, policy: Policy) -> Finding:
    numerics = result.assignment.candidate.numerics
    against_reference = reference_checks(result)
    if numerics is Numerics.BIT_IDENTICAL:
        loaded = loaded_checks(result) or against_reference
        return right_for_class(loaded, numerics, band, policy)
    finding = right_for_class(against_reference, numerics, band, policy)
    if not finding.ok:
        return finding
    positions = sum(check.positions for check in against_reference)
    if positions < policy.min_positions:
        return Finding(
            ok=False, evidence=f"no output verdict: {positions} rows of logits compared, {policy.min_positions} needed"
        )
    broken = [c for c in result.checks if c.against == "incumbent" and not math.isfinite(c.max_abs)]
    if broken:
        return Finding(ok=False, evidence=f"non-finite logits in a timed window of {broken[0].row.key}")
    return _beside_incumbent(result, numerics, band, policy) or finding


def _beside_incumbent(result: MeasureResult, numerics: Numerics, band: Band, policy: Policy) -> Finding | None:
    """Windows without a reference: both sides may differ from it by their class, so from each other by the sum of both."""
    widest = max(numerics, result.assignment.incumbent.numerics, key=lambda kind: kind.rank)
    checks = [check for check in result.checks if check.against == "incumbent"]
    if widest is Numerics.LOSSY or not checks:
        return None
    worst = max(checks, key=lambda check: check.max_abs)
    if worst.max_abs <= 2 * band.max_abs:
        return None
    return Finding(
        ok=False,
        evidence=f"timed logits differ from the incumbent's by {worst.max_abs:.2g} on {worst.row.key}, both bands allow {2 * band.max_abs:.2g}",
    )


def _never_ran(result: MeasureResult) -> tuple[Verdict, str] | None:
    """What was given up before some rows may have been meant for those."""
    if not result.assignment.candidate.parts or result.at_most:
        return None
    silent = [slot for slot, calls in result.activation.items() if calls == 0]
    if silent or not result.activation:
        shown = ", ".join(silent[:3]) + (", …" if len(silent) > 3 else "")
        return Verdict.INVALID, f"the part never ran in a timed window ({shown or 'no slot reported'})"
    return None


def _left_behind(result: MeasureResult) -> tuple[Verdict, str] | None:
    if not result.weights_unchanged:
        return Verdict.INVALID, "shared weights were changed"
    if result.clean is not None and not result.clean.clean:
        return Verdict.INVALID, f"the engine was not left clean: {'; '.join(result.clean.reasons[:3])}"
    return None


def _disturbed(result: MeasureResult, policy: Policy) -> tuple[Verdict, str] | None:
    limit = 1 + max(policy.disturbed_margin, 3 * result.noise_floor)
    # A/A has the incumbent on both sides: a difference is the machine's noise, which its interval shows.
    # The search may put a slow incumbent down to an unsteady machine. What is claimed may not: it would be claimed too large.
    claimed = result.assignment.purpose is Purpose.COLD
    unsteady = not claimed and result.disturbed_low is not None and result.disturbed_low <= 1.0
    if result.incumbent_disturbed <= limit or unsteady or result.assignment.purpose is Purpose.AA:
        return None
    return (
        Verdict.INVALID,
        f"{DISTURBED}: {result.incumbent_disturbed:.3f} x its time beside itself, the limit is {limit:.3f}",
    )


def _clock(result: MeasureResult, policy: Policy) -> tuple[Verdict, str] | None:
    """More than the judge's time is impossible. A child that says less gains nothing by it, and a busy machine, on which a message waits,
    makes it so for both sides: a lie is what the candidate's side alone says less, on every block of a row."""
    rows: dict[str, list[MeasuredBlock]] = {}
    for block in result.blocks:
        rows.setdefault(block.row.key, []).append(block)
    off = []
    for blocks in rows.values():
        best = max(blocks, key=lambda block: block.child_clock_ratio)
        usual = max(block.incumbent_clock_ratio for block in blocks)
        if best.child_clock_ratio > policy.clock_high or best.child_clock_ratio < policy.clock_low * min(1.0, usual):
            off.append(best)
    if not off:
        return None
    worst = max(off, key=lambda block: abs(math.log(max(block.child_clock_ratio, 1e-9))))
    return (
        Verdict.INVALID,
        f"{CLOCKS} on {worst.row.key}: the child says {worst.child_clock_ratio:.2f} of the judge's time",
    )


def _impossible(
    result: MeasureResult, policy: Policy, floors_ms: Mapping[str, float], num_layers: int
) -> tuple[Verdict, str] | None:
    for block in result.blocks:
        floor = floors_ms.get(block.row.key)
        fastest = min(block.candidate_ms)
        if fastest <= 0 or (floor and block.layers == num_layers and fastest < policy.floor_fraction * floor):
            return (
                Verdict.INVALID,
                f"suspect: {fastest:.3f} ms on {block.row.key} is below the physical floor of {floor or 0:.3f} ms",
            )
    return None


def _by_blocks(result: MeasureResult, shapes: ShapeTable, num_layers: int) -> Attempt:
    try:
        speed = speed_of(result.blocks, num_layers, result.assignment.stopping)
    except ValueError as error:
        return _attempt(result, Verdict.INVALID, str(error))
    verdict, reason = _speed_verdict(speed)
    measured_share = sum(row.steps_share for row in result.assignment.rows) / sum(
        row.steps_share for row in shapes.rows
    )
    rate = shapes.output_tokens_per_step / speed.candidate_ms * 1e3
    if measured_share < 0.999:
        reason += f"; rows measured hold {measured_share:.0%} of steps"
    return _attempt(result, verdict, reason, speed=speed, tokens_per_second=rate)


def _far_behind(result: MeasureResult) -> Attempt:
    """Whatever the rows that were left out would have shown: a bound, and no time of the deployment."""
    test = SequentialTest(result.assignment.stopping)
    for bound in result.at_most:
        test.add(math.log(bound))
    high = math.exp(test.interval()[1]) if len(test.values) > 1 else math.inf
    measured = {block.row.key for block in result.blocks}
    left_out = ", ".join(row.key for row in result.assignment.rows if row.key not in measured)
    found = f"at most {math.exp(test.mean):.3f} x [0, {high:.3f}], even if {left_out} took it no time"
    slower = high < 1
    return Attempt(
        **_common(result),
        verdict=Verdict.SLOWER if slower else Verdict.INCONCLUSIVE,
        reason=found if slower else f"given up far behind: {found}",
        speedup=Estimate(value=math.exp(test.mean), low=0.0, high=high, level=1 - test.stopping.alpha, kind="bound"),
        tokens_per_second=None,
        rounds=len(test.values),
    )


def _speed_verdict(speed: Speed) -> tuple[Verdict, str]:
    span = f"{speed.estimate.value:.3f} x [{speed.estimate.low:.3f}, {speed.estimate.high:.3f}] after {speed.rounds} rounds"
    if speed.estimate.kind == "predicted":
        span += " (predicted from two depths)"
    if speed.low > 0:
        return Verdict.FASTER, span
    if speed.high < 0:
        return Verdict.SLOWER, span
    if speed.decision == "hopeless":
        value, count = speed.estimate.value, speed.rounds
        return Verdict.INCONCLUSIVE, f"given up far behind: {value:.3f} x in {count} round{'s' if count > 1 else ''}"
    why = "equal within the margin" if speed.decision == "equal" else "the interval holds 1"
    return Verdict.INCONCLUSIVE, f"{why}: {span}"


def _by_replay(result: MeasureResult) -> Attempt:
    test = SequentialTest(result.assignment.stopping)
    for replay in result.replays:
        test.add(replay.log_ratio)
    low, high = test.interval()
    estimate = speedup_of_replays(result.replays)
    span = f"{estimate.value:.3f} x [{estimate.low:.3f}, {estimate.high:.3f}] over {len(result.replays)} replays"
    if low > 0:
        verdict, reason = Verdict.FASTER, span
    elif high < 0:
        verdict, reason = Verdict.SLOWER, span
    else:
        verdict, reason = Verdict.INCONCLUSIVE, f"undecided by the sequential test: {span}"
    runs = [stats for replay in result.replays for stats in replay.candidate]
    rate = sum(stats.output_tokens for stats in runs) / sum(stats.wall_seconds for stats in runs)
    return Attempt(
        **_common(result),
        verdict=verdict,
        reason=reason,
        speedup=estimate,
        tokens_per_second=rate,
        rounds=len(result.replays),
    )


def _attempt(
    result: MeasureResult,
    verdict: Verdict,
    reason: str,
    *,
    speed: Speed | None = None,
    tokens_per_second: float | None = None,
) -> Attempt:
    return Attempt(
        **_common(result),
        verdict=verdict,
        reason=reason,
        speedup=speed.estimate if speed and verdict.is_timed else None,
        tokens_per_second=tokens_per_second,
        rounds=speed.rounds if speed else 0,
    )


def _common(result: MeasureResult) -> dict[str, Any]:
    order = result.assignment
    return {
        "candidate_id": order.candidate.id,
        "incumbent_id": order.incumbent.id,
        "tier": order.tier,
        "purpose": order.purpose,
        "numerics_measured": summary(reference_checks(result)),
        "seconds": result.phases_ms.get("total", sum(result.phases_ms.values())) / 1e3,
    }


def is_as_loaded(candidate: Candidate) -> bool:
    """True for the deployment as loaded."""
    return candidate.id == AS_LOADED.id
