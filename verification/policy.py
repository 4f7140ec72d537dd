"""What a campaign allows, and the limits that verdicts are given by. Each limit names where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from hotpass.records.candidate import Numerics


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Limits of one campaign. Defaults are for text models on one machine."""

    numerics: Numerics = Numerics.TOLERANCE
    """Widest class that may win."""
    reorder_factor: float = 16.0
    """Tolerance: largest logit difference allowed, in multiples of what reordering the reference's sums changes."""
    reorder_floor_relative: float = 5e-5
    """Floor of that band relative to the logits' root mean square: sums over a few thousand fp32 terms differ by this."""
    loaded_factor: float = 1.5
    """Tolerance on a model declared narrower than fp32: largest difference allowed, in multiples of the loaded baseline's own."""
    lossy_kl: float = 0.02
    """Lossy: mean KL divergence to the reference allowed, nats."""
    lossy_clear_agreement: float = 0.98
    """Lossy: share of decided greedy tokens that must agree (`OutputCheck.argmax_decided`: by a tenth of the logits' scale), and of all
    greedy tokens that must be the reference's best or within that tenth of it."""
    lossy_row_relative: float = 0.5
    """Lossy: the worst row's root mean square difference allowed, relative to the logits' root mean square."""
    disturbed_margin: float = 0.05
    """An incumbent slower beside the candidate than beside itself by more than this (and three noise floors) is disturbed; in the search
    only where the noise of undisturbed windows does not explain it (`MeasureResult.disturbed_low`)."""
    clock_low: float = 0.5
    clock_high: float = 1.02
    """Child's time over the judge's must lie between: the message costs a little, and time cannot be negative. The lower one is of what
    the incumbent's windows show, since on a busy machine messages wait."""
    floor_fraction: float = 0.8
    """A step faster than this fraction of its physical floor is impossible (the floor's own bandwidth is measured with error)."""
    min_positions: int = 8
    """Rows of logits that must have been compared with the reference before any verdict on speed."""
