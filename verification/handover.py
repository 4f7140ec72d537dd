"""What a candidate leaves to others: KV that the next forward reads, and tokens that clients get. Pure, as all verdicts.

Right logits in windows say nothing of either: a candidate may keep a cache of its own, or serve something else than it computes.
"""

from __future__ import annotations

import math

from hotpass.records.candidate import Numerics
from hotpass.records.measurement import MeasureResult, TokenCheck
from verification.numerics import Band, Finding
from verification.policy import Policy

BOTH_SIDES = 2.0
"""Candidate and reader are each allowed their band around the truth, so their answers lie within the sum of both."""
LOSSY_KV_KL = 10.0
"""Lossy: of the policy's limit of the mean KL, for few positions and a reader of other precision; KV of another text is far beyond."""


def wrong_for_others(result: MeasureResult, band: Band, policy: Policy) -> Finding | None:
    """Why the KV or the served tokens of an attempt are not right for its class; None when they are, or none were looked at."""
    return _kv(result, band, policy) or _served(result, band, policy)


def _kv(result: MeasureResult, band: Band, policy: Policy) -> Finding | None:
    checks = [check for check in result.checks if check.against == "kv"]
    if not checks:
        return None
    worst = max(checks, key=lambda check: check.max_abs)
    if result.assignment.candidate.numerics is Numerics.LOSSY:
        relative = max(check.worst_row_rms / (check.reference_rms or math.inf) for check in checks)
        divergence = max(check.kl_mean for check in checks)
        if relative <= BOTH_SIDES * policy.lossy_row_relative and divergence <= LOSSY_KV_KL * policy.lossy_kl:
            return None
        limits = f"{relative:.2g} of the logits' scale, {divergence:.2g} nats"
    elif worst.max_abs <= BOTH_SIDES * band.max_abs:
        return None
    else:
        limits = f"{worst.max_abs:.2g}, both bands allow {BOTH_SIDES * band.max_abs:.2g}"
    return Finding(ok=False, evidence=f"KV left on {worst.row.key} is not what the next step needs: off by {limits}")


def _served(result: MeasureResult, band: Band, policy: Policy) -> Finding | None:
    check = result.tokens
    if check is None:
        return None
    count = len(check.regrets)
    if result.assignment.candidate.numerics is Numerics.LOSSY:
        limit = policy.lossy_row_relative * check.reference_rms
        allowed = max(1, math.floor((1 - policy.lossy_clear_agreement) * count + 1e-9))
    else:
        limit, allowed = BOTH_SIDES * band.max_abs, 0
    wrong = _beyond(check, limit)
    if wrong <= allowed:
        return None
    worst = max(check.regrets, key=lambda regret: math.inf if math.isnan(regret) else regret)
    return Finding(
        ok=False,
        evidence=f"{wrong} of {count} served tokens are not what the reference would serve: one lies {worst:.2g} below the best, the limit is {limit:.2g}",
    )


def _beyond(check: TokenCheck, limit: float) -> int:
    return sum(not regret <= limit for regret in check.regrets)
