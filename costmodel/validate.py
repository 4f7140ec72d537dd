"""Scores of the cost model on measured rows: error, rank, interval coverage, what was refused, and the regret of its choices.

Nothing here fits. A row's prediction is zero-shot, or comes from a calibration that never saw its architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from costmodel.interval import Z90
from costmodel.measured import predict_rows
from costmodel.records import SERVING_SPREAD
from costmodel.shortlist import Choices, Spans, shortlist

GROUP = ["model_path", "system", "isl", "osl", "mode"]
"""Rows that compete with each other."""
SMALLEST_GROUP = 20
TPOT_CAPS_MS = (20.0, 50.0, 100.0)
DEPLOYED = ("_size", "_num_workers", "precision", "backend_version")
"""Ends of the columns that say how a model is deployed."""
BROKEN = 5.0
"""A row that is off by more than this factor from a prediction of measured kernels is reported by name; it counts like any other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One target over some rows."""

    rows: int
    p50: float
    """Absolute relative error."""
    p90: float
    p99: float
    spearman: float
    coverage90: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Regret:
    """What choosing by prediction loses, over groups of competing rows under caps of the time per token."""

    groups: int
    kept_within_5_percent: float
    """Share of groups whose best row among the predicted best max(3, 10 %) is within 5 % of the group's best."""
    covered_within_5_percent: float
    """The same where the kept are spread over what is uncertain (`costmodel.shortlist`), all chosen before any is measured."""
    in_turn_within_5_percent: float
    """The same where each of the kept is measured before the next is chosen."""
    top1_median: float
    """Share of tokens/s/GPU lost by the first choice."""
    top1_p90: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """A whole validation."""

    rows: int
    answered: float
    refused: dict[str, int]
    """Reason → rows."""
    scores: dict[str, Score]
    """Target → all rows; `target/model/system/backend` → those."""
    told: dict[str, Score]
    """Target → rows that say all about their deployment."""
    regret: Regret
    regret_aggregated: Regret
    """Of the groups whose rows serve prefill and decode on the same accelerators, so that their number is known."""
    broken: tuple[str, ...] = field(default_factory=tuple)
    """Ids of rows that look broken."""


NO_REGRET = Regret(
    groups=0, kept_within_5_percent=float("nan"), covered_within_5_percent=float("nan"), in_turn_within_5_percent=float("nan"),
    top1_median=float("nan"), top1_p90=float("nan"),
)  # fmt: skip


def _counted(predicted: pd.DataFrame) -> dict[str, int]:
    reasons = predicted.loc[predicted["refused"] != "", "refused"].value_counts()
    return {str(reason): int(count) for reason, count in reasons.items()}


def zero_shot(predicted: pd.DataFrame, target: str) -> pd.DataFrame:
    """`value`, `low`, `high` in ms without any calibration."""
    spread = np.sqrt(predicted["spread"] ** 2 + SERVING_SPREAD[target] ** 2)
    value = predicted[f"{target}_ms"]
    return pd.DataFrame({"value": value, "low": value * np.exp(-Z90 * spread), "high": value * np.exp(Z90 * spread)})


def score(rows: pd.DataFrame, made: pd.DataFrame, target: str) -> Score:
    """Rows with a measured `silicon_<target>_ms` against `value`, `low`, `high`."""
    measured = rows[f"silicon_{target}_ms"]
    error = (made["value"] / measured - 1.0).abs()
    return Score(
        rows=len(rows),
        p50=float(error.median()),
        p90=float(error.quantile(0.9)),
        p99=float(error.quantile(0.99)),
        spearman=float(made["value"].rank().corr(measured.rank())) if len(rows) > 2 else float("nan"),
        coverage90=float(((made["low"] <= measured) & (measured <= made["high"])).mean()),
    )


def validate(
    rows: pd.DataFrame, predicted: pd.DataFrame | None = None, made: dict[str, pd.DataFrame] | None = None
) -> Validation:
    """Score `rows`. `made`: target → predictions of the answered rows, where they are not the zero-shot ones."""
    found = predict_rows(rows) if predicted is None else predicted
    answered = found["refused"] == ""
    good, priced = rows[answered], found[answered]
    if not len(good):
        return Validation(
            rows=len(rows),
            answered=0.0,
            refused=_counted(found),
            scores={},
            told={},
            regret=NO_REGRET,
            regret_aggregated=NO_REGRET,
        )
    own = made or {target: zero_shot(priced, target) for target in ("tpot", "ttft")}
    scores = {target: score(good, own[target], target) for target in own}
    for target in own:
        for names, part in good.groupby(["model_path", "system", "backend"]):
            scores["/".join([target, *(str(name) for name in names)])] = score(
                part, own[target].loc[part.index], target
            )
    told = priced["open"] == 0
    off = own["tpot"]["value"] / good["silicon_tpot_ms"]
    ids = good["id"] if "id" in good else good.index.astype(str).to_series(index=good.index)
    return Validation(
        rows=len(rows),
        answered=float(answered.mean()),
        refused=_counted(found),
        scores=scores,
        told={t: score(good[told], own[t][told], t) for t in own} if told.any() else {},
        regret=regret(good, priced, own),
        regret_aggregated=regret(good[good["mode"] != "disagg"], priced[good["mode"] != "disagg"], own),
        broken=tuple(ids[(off > BROKEN) | (off < 1 / BROKEN)]),
    )


def regret(rows: pd.DataFrame, priced: pd.DataFrame, made: dict[str, pd.DataFrame]) -> Regret:
    """Groups of at least 20 rows; tokens/s/GPU from the closed loop's cycle, measured and predicted alike."""
    lost: list[float] = []
    kept: dict[str, list[bool]] = {"ranked": [], "covered": [], "in_turn": []}
    for _, part in rows.groupby(GROUP):
        if len(part) < SMALLEST_GROUP:
            continue
        choices = _choices(part, priced.loc[part.index], {name: own.loc[part.index] for name, own in made.items()})
        times = part[["silicon_tpot_ms", "silicon_ttft_ms"]].to_numpy(float)
        true = choices.rate(times[:, 0], times[:, 1])
        guess = choices.rate(choices.tpot.value, choices.ttft.value)
        count = max(3, len(part) // 10)
        for cap in TPOT_CAPS_MS:
            reached = np.where(times[:, 0] <= cap, true, 0.0)
            best = float(reached.max())
            ranked = np.argsort(-np.where(choices.tpot.value <= cap, guess, 0.0), kind="stable")
            ranked = ranked[choices.tpot.value[ranked] <= cap]
            if not best or not len(ranked):
                continue
            found = {
                "ranked": ranked[:count].tolist(),
                "covered": shortlist(choices, cap, count),
                "in_turn": shortlist(choices, cap, count, [(tpot, ttft) for tpot, ttft in times.tolist()].__getitem__),
            }
            for name, few in found.items():
                kept[name].append(float(reached[few].max()) >= 0.95 * best)
            lost.append(1.0 - float(reached[ranked[0]]) / best)
    if not lost:
        return NO_REGRET
    return Regret(
        groups=len(lost),
        kept_within_5_percent=float(np.mean(kept["ranked"])),
        covered_within_5_percent=float(np.mean(kept["covered"])),
        in_turn_within_5_percent=float(np.mean(kept["in_turn"])),
        top1_median=float(np.median(lost)),
        top1_p90=float(np.quantile(lost, 0.9)),
    )


def _choices(rows: pd.DataFrame, priced: pd.DataFrame, made: dict[str, pd.DataFrame]) -> Choices:
    """Competing rows; a deployment is all that a row says but its load."""
    names = [name for name in map(str, rows.columns) if name.endswith(DEPLOYED) and "batch" not in name]
    deployed = rows[["backend", *names]].astype(object).fillna("").astype(str).agg("|".join, axis=1)
    spans = {
        name: Spans(**{end: own[end].to_numpy(float) for end in ("value", "low", "high")}) for name, own in made.items()
    }
    tokens = rows["osl"].to_numpy(float)
    return Choices(
        tpot=spans["tpot"], ttft=spans["ttft"], work=priced["clients"].to_numpy(float) * tokens / priced["gpus"].to_numpy(float),
        output_tokens=tokens, engines=pd.factorize(rows["backend"])[0], deployments=pd.factorize(deployed)[0],
    )  # fmt: skip
