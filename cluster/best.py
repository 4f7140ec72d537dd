"""The best of a campaign, the same whoever asks: command line, Python, MLflow, release.

    log ─► CampaignState.best ─┬─► claim_of ────────────► `hotpass best DIR`, `Campaign.best`, release/
                               └─► result ─► MLflow ─► claim_in ─► `hotpass best mlflow:ID`

A best was measured cold, was faster, and has an explicit pass of every gate. An attempt that was faster and lacks one of these is none,
wherever it is looked for. What is not here: who leads a search that still runs (`hotpass status`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.journal import read_state
from cluster.plan import read_plan
from cluster.state import CampaignState
from hotpass.errors import InputError
from hotpass.records.measurement import Estimate

MLFLOW = "mlflow:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a campaign claims of its best."""

    candidate_id: str
    label: str
    speedup_vs_loaded: Estimate
    """Cold, over the deployment as loaded, with its 95 % interval; to four digits, as it is published."""
    tokens_per_s: float | None
    gates: Mapping[str, str]
    """Each `pass`."""


def claim_of(state: CampaignState) -> Claim | None:
    """By the log; None without a best."""
    row = state.best()
    if row is None or row.speedup_vs_loaded is None or state.winner is None:
        return None
    found, rate = row.speedup_vs_loaded, row.attempt.tokens_per_second
    return Claim(
        candidate_id=row.attempt.candidate_id,
        label=state.label_of(row.attempt.candidate_id),
        speedup_vs_loaded=Estimate(
            value=round(found.value, 4), low=round(found.low, 4), high=round(found.high, 4), kind=found.kind
        ),
        tokens_per_s=round(rate, 3) if rate else None,
        gates=dict(state.winner["gates"]),
    )


def claim_in(where: str, tracking_uri: str = "") -> Claim | None:
    """Of a campaign folder, or of `mlflow:ID` (a campaign's id or name) at `tracking_uri`; None without a best.

    Raises InputError when the campaign is not there.
    """
    if not where.startswith(MLFLOW):
        if tracking_uri:
            remedy = "leave --tracking-uri out, or name the campaign as mlflow:ID"
            raise InputError("--tracking-uri", tracking_uri, "is not asked about a folder", remedy)
        read_plan(Path(where))  # says in one sentence when it is no campaign
        return claim_of(read_state(Path(where)))
    from cluster.mirrored import fetch_best
    from cluster.tracking import resolve_uri

    if not tracking_uri:
        raise InputError("campaign", where, "needs the server that has it", "give --tracking-uri too")
    return fetch_best(resolve_uri(Path(), tracking_uri)[0], where.removeprefix(MLFLOW))
