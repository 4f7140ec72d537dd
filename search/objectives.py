"""What a search maximises: ratios over the incumbent, above 1 where the candidate is better. The first objective named leads.

    MeasureResult ─► ratios_of ─► Attempt.ratios ─► ratio_of(attempt, objective) ─► the study's values

A point estimate each: they steer a search with two objectives; verdicts, promotion and claims rest on the speedup and its interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from hotpass.errors import InputError, nearest
from hotpass.records.measurement import Attempt, MeasuredBlock, MeasuredReplay, MeasureResult, ReplayStats
from hotpass.records.shapes import Phase
from hotpass.stats import rounds_of

TOKENS_PER_S, TTFT, TPOT = "tokens_per_s", "ttft", "tpot"
OBJECTIVES = {
    TOKENS_PER_S: "tokens per second over the shape table",
    TTFT: "time to first token: the prefill rows (fast tier), the median request (slow tier)",
    TPOT: "time per output token: the decode rows (fast tier), the median request (slow tier)",
}


def parse_objectives(text: str) -> tuple[str, ...]:
    """`tokens_per_s,ttft` as names. Raises InputError for an unknown or repeated one, or more than two."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in OBJECTIVES:
            raise InputError("objective", name, "is not known", nearest(name, list(OBJECTIVES)))
    if not names or len(names) > 2 or len(set(names)) != len(names):
        raise InputError("objective", text, "is not one or two different objectives", f"known: {', '.join(OBJECTIVES)}")
    if names[0] != TOKENS_PER_S:
        raise InputError(
            "objective", text, f"does not begin with {TOKENS_PER_S}", "verdicts are about it; name it first"
        )
    return names


def ratio_of(attempt: Attempt, objective: str) -> float:
    """Of the candidate over its incumbent; NaN where it was not measured."""
    if objective == TOKENS_PER_S:
        return attempt.speedup.value if attempt.speedup else math.nan
    return attempt.ratios.get(objective, math.nan)


def ratios_of(result: MeasureResult) -> dict[str, float]:
    """TTFT and TPOT of the incumbent over those of the candidate; one that the deployment's rows do not show is left out."""
    if result.replays:
        first, later = (_of_replays(result.replays, times) for times in (_first_tokens, _later_tokens))
    else:
        first, later = (_of_blocks(_blocks_of(result, objective)) for objective in (TTFT, TPOT))
    return {name: ratio for name, ratio in ((TTFT, first), (TPOT, later)) if ratio is not None}


def log_ratios_of(result: MeasureResult, objective: str) -> list[float]:
    """TTFT or TPOT, one log ratio a round (or a block of replays), above 0 where the candidate is better."""
    if result.replays:
        times_of = _first_tokens if objective == TTFT else _later_tokens
        ratios = [_of_replays([replay], times_of) for replay in result.replays]
    else:
        ratios = [_of_blocks(blocks) for blocks in rounds_of(_blocks_of(result, objective))]
    return [math.log(ratio) for ratio in ratios if ratio is not None]


def _blocks_of(result: MeasureResult, objective: str) -> list[MeasuredBlock]:
    """Of the rows that the objective is about, at the greatest depth that was run."""
    deepest = max((block.layers for block in result.blocks), default=0)
    is_later = objective == TPOT
    return [b for b in result.blocks if b.layers == deepest and (b.row.phase is Phase.DECODE) == is_later]


def _of_blocks(blocks: Iterable[MeasuredBlock]) -> float | None:
    """Geometric over blocks, weighted by how often a step has the row's shape."""
    weighted = [(block.row.steps_share, block.log_ratio) for block in blocks]
    weight = sum(share for share, _ in weighted)
    return math.exp(sum(share * ratio for share, ratio in weighted) / weight) if weight > 0 else None


def _of_replays(replays: Sequence[MeasuredReplay], times_of: Callable[[ReplayStats], Sequence[float]]) -> float | None:
    incumbent = [ms for replay in replays for stats in replay.incumbent for ms in times_of(stats)]
    candidate = [ms for replay in replays for stats in replay.candidate for ms in times_of(stats)]
    if not incumbent or not candidate or statistics.median(candidate) <= 0:
        return None
    return statistics.median(incumbent) / statistics.median(candidate)


def _first_tokens(stats: ReplayStats) -> Sequence[float]:
    return stats.ttft_ms


def _later_tokens(stats: ReplayStats) -> Sequence[float]:
    return stats.tpot_ms
