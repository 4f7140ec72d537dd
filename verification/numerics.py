"""From output checks to "right enough for its class", with the evidence. The limits come from calibration, not from the declaration.

`Band` is calibrated once an engine: by what reordering the reference's sums changes, and (for a model declared in a narrow dtype)
by what the loaded baseline itself differs by. What lies outside is rejected with the number that said so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hotpass.records.candidate import AS_LOADED, Numerics
from hotpass.records.measurement import MeasureResult, OutputCheck
from verification.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Largest differences that the tolerance class may show on this deployment."""

    max_abs: float
    """Of any logit."""
    row_rms: float
    """Of any row's root mean square difference."""
    noise_abs: float
    """Largest difference from reordering alone: decides which greedy tokens are clear."""
    source: str
    """Sentence that says how the band came about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Right for its class, or why not."""

    ok: bool
    evidence: str


def calibrate(reordered: Sequence[OutputCheck], loaded: Sequence[OutputCheck], dtype: str, policy: Policy) -> Band:
    """The band from checks of the reordered reference, and of the loaded baseline when `dtype` is narrower than float32.

    Raises ValueError when a check is not finite or none was made: a band without evidence is not a band.
    """
    if not reordered:
        raise ValueError("no check of the reordered reference: a band needs one")
    noise = max(check.max_abs for check in reordered)
    scale = max(check.reference_rms for check in reordered)
    if not (math.isfinite(noise) and math.isfinite(scale) and scale > 0):
        raise ValueError(f"the reference is not finite (noise {noise}, scale {scale})")
    noise = max(noise, policy.reorder_floor_relative * scale / policy.reorder_factor)
    max_abs = policy.reorder_factor * noise
    source = f"{policy.reorder_factor:g} x the {noise:.2g} that reordering sums changes"
    row_rms = max_abs / 2
    if dtype != "float32" and loaded:
        own = max(check.max_abs for check in loaded)
        own_rms = max(check.worst_row_rms for check in loaded)
        if policy.loaded_factor * own > max_abs:
            max_abs, row_rms = policy.loaded_factor * own, policy.loaded_factor * own_rms
            source = f"{policy.loaded_factor:g} x the {own:.2g} that the {dtype} baseline as loaded differs by"
    return Band(max_abs=max_abs, row_rms=row_rms, noise_abs=noise, source=source)


def right_for_class(checks: Sequence[OutputCheck], numerics: Numerics, band: Band, policy: Policy) -> Finding:
    """Whether all checks satisfy a class. `checks` are against the reference (for bit-identical: against the loaded baseline)."""
    if not checks:
        return Finding(ok=False, evidence="no output was compared")
    broken = [check for check in checks if not _finite(check)]
    if broken:
        return Finding(ok=False, evidence=f"non-finite logits on {broken[0].row.key}")
    if numerics is Numerics.BIT_IDENTICAL:
        return _bit_identical(checks)
    if numerics is Numerics.LOSSY:
        return _lossy(checks, policy)
    return _tolerance(checks, band)


def reference_checks(result: MeasureResult) -> tuple[OutputCheck, ...]:
    """Those against the reference."""
    return tuple(check for check in result.checks if check.against == "reference")


def loaded_checks(result: MeasureResult) -> tuple[OutputCheck, ...]:
    """Those that compare with the deployment as loaded, bit for bit: the incumbent's, when that is what it is."""
    if result.assignment.incumbent == AS_LOADED:
        return tuple(check for check in result.checks if check.against == "incumbent")
    return tuple(check for check in result.checks if check.against == "loaded")


def summary(checks: Iterable[OutputCheck]) -> dict[str, float]:
    """The numbers people compare: over all checks, sums before divisions."""
    found = list(checks)
    positions = sum(check.positions for check in found)
    if not positions:
        return {}
    clear = sum(check.argmax_clear for check in found)
    decided = sum(check.argmax_decided for check in found)
    scale = max(check.reference_rms for check in found)
    rms = math.sqrt(sum(check.rms**2 * check.positions for check in found) / positions)
    return {
        "max_abs": max(check.max_abs for check in found),
        "rms": rms,
        "relative_rms": rms / scale if scale else math.inf,
        "argmax_agreement": sum(check.argmax_agree for check in found) / positions,
        "decided_agreement": sum(check.argmax_decided_agree for check in found) / decided if decided else 1.0,
        "clear_agreement": sum(check.argmax_clear_agree for check in found) / clear if clear else 1.0,
        "kl_mean": sum(check.kl_mean * check.positions for check in found) / positions,
        "positions": float(positions),
    }


def _bit_identical(checks: Sequence[OutputCheck]) -> Finding:
    differing = [check for check in checks if not check.bit_equal]
    if differing:
        worst = max(differing, key=lambda check: check.max_abs)
        return Finding(
            ok=False, evidence=f"not bit-identical on {worst.row.key}: largest difference {worst.max_abs:.2g}"
        )
    return Finding(ok=True, evidence=f"bit-identical over {sum(check.positions for check in checks)} rows of logits")


def _tolerance(checks: Sequence[OutputCheck], band: Band) -> Finding:
    worst = max(checks, key=lambda check: check.max_abs)
    row = max(checks, key=lambda check: check.worst_row_rms)
    if not worst.max_abs <= band.max_abs:
        return Finding(
            ok=False,
            evidence=f"logits differ by {worst.max_abs:.2g} on {worst.row.key}, the band is {band.max_abs:.2g} ({band.source})",
        )
    if not row.worst_row_rms <= band.row_rms:
        return Finding(
            ok=False,
            evidence=f"one row of {row.row.key} differs by {row.worst_row_rms:.2g} rms, the band is {band.row_rms:.2g}",
        )
    wrong = sum(check.argmax_clear - check.argmax_clear_agree for check in checks)
    if wrong:
        return Finding(ok=False, evidence=f"{wrong} clearly decided greedy tokens differ")
    return Finding(
        ok=True, evidence=f"largest difference {worst.max_abs:.2g} within {band.max_abs:.2g} ({band.source})"
    )


def _lossy(checks: Sequence[OutputCheck], policy: Policy) -> Finding:
    found = summary(checks)
    row = max(checks, key=lambda check: check.worst_row_rms / (check.reference_rms or math.inf))
    relative = row.worst_row_rms / row.reference_rms if row.reference_rms else math.inf
    if not found["kl_mean"] <= policy.lossy_kl:
        return Finding(ok=False, evidence=f"mean KL {found['kl_mean']:.2g} nats, the limit is {policy.lossy_kl:g}")
    if not relative <= policy.lossy_row_relative:
        return Finding(
            ok=False,
            evidence=f"one row of {row.row.key} is off by {relative:.2g} of the logits' scale, the limit is {policy.lossy_row_relative:g}",
        )
    if not found["decided_agreement"] >= policy.lossy_clear_agreement:
        return Finding(
            ok=False,
            evidence=f"{found['decided_agreement']:.3f} of decided greedy tokens agree, the limit is {policy.lossy_clear_agreement:g}",
        )
    near = _near(checks)
    if not near >= policy.lossy_clear_agreement:
        return Finding(
            ok=False,
            evidence=f"{near:.3f} of greedy tokens are the reference's or nearly as good to it, the limit is {policy.lossy_clear_agreement:g}",
        )
    return Finding(
        ok=True,
        evidence=f"mean KL {found['kl_mean']:.2g} nats, {found['decided_agreement']:.3f} of decided tokens agree",
    )


def _near(checks: Sequence[OutputCheck]) -> float:
    """Share of positions with a token that the reference all but chose: where a near tie may go either way, it may go no other way."""
    counted = [check for check in checks if check.argmax_near is not None]
    positions = sum(check.positions for check in counted)
    return sum(check.argmax_near or 0 for check in counted) / positions if positions else 1.0


def _finite(check: OutputCheck) -> bool:
    return all(math.isfinite(value) for value in (check.max_abs, check.rms, check.worst_row_rms, check.kl_mean))
