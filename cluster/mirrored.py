"""What can be read back from MLflow alone, without the folder of a campaign: its measured passes, its fastest candidates, its best.

tracking store ─► the campaign's run ─┬─ passes/*.parquet ─► one table
                                      ├─ children ─► candidates' folders, byte for byte (`--warm-start mlflow:ID`)
                                      └─ claim/…, winner, gates ─► the best, if every gate passed
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.best import Claim
from cluster.ledger import children_of, import_mlflow
from cluster.passes import PASSES
from hotpass.errors import InputError
from hotpass.records.measurement import Estimate
from verification.gates import passed

if TYPE_CHECKING:
    import pandas


def fetch_best(tracking_uri: str, campaign: str) -> Claim | None:
    """None unless the campaign has ended with a winner that passed every gate explicitly. Raises InputError when it is not there."""
    _, run = _found(tracking_uri, campaign)
    tags, metrics = run.data.tags, run.data.metrics
    gates: dict[str, str] = json.loads(tags.get("gates", "{}"))
    claim = {key: metrics.get(f"claim/speedup_vs_loaded{key}") for key in ("", "_low", "_high")}
    is_over = run.info.status == "FINISHED" and tags.get("winner", "none") != "none"
    if not is_over or not passed(gates) or None in claim.values():
        return None
    return Claim(
        candidate_id=tags["winner"],
        label=tags.get("winner_label", ""),
        speedup_vs_loaded=Estimate(
            value=claim[""], low=claim["_low"], high=claim["_high"], kind=tags.get("claim_kind", "measured")
        ),
        tokens_per_s=metrics.get("claim/tokens_per_s"),
        gates=gates,
    )


def read_back(tracking_uri: str, campaign: str) -> pandas.DataFrame:
    """The measured passes of a campaign (its name, or its id): columns `cluster.passes.PASS_COLUMNS`.

    Of several campaigns with that name, the latest. Raises InputError when there is none, or it has no passes yet.
    """
    import pandas

    client, run = _found(tracking_uri, campaign)
    files = client.list_artifacts(run.info.run_id, PASSES)
    if not files:
        raise InputError(
            "campaign", campaign, "has no measured passes there", f"look at the campaigns of {tracking_uri}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        frames = [pandas.read_parquet(client.download_artifacts(run.info.run_id, file.path, scratch)) for file in files]
    return pandas.concat(frames, ignore_index=True)


def fetch_candidates(tracking_uri: str, campaign: str, into: Path, *, limit: int) -> list[tuple[Path, float]]:
    """Folders of the fastest candidates of a campaign (its name, or its id), with their ratio over as loaded.

    By the fast attempts of the search; each candidate once, the fastest first. Raises InputError when the campaign is not there.
    """
    client, parent = _found(tracking_uri, campaign)
    best: dict[str, tuple[float, str]] = {}
    for run in children_of(client, parent.info.experiment_id, parent.info.run_id):
        searched = run.data.tags.get("tier") == "fast" and run.data.tags.get("purpose") in ("search", "remeasure")
        ratio, candidate = run.data.metrics.get("speedup"), run.data.params.get("candidate", "")
        if searched and candidate and ratio is not None and ratio > best.get(candidate, (0.0, ""))[0]:
            best[candidate] = (ratio, run.info.run_id)
    fastest = sorted(best.items(), key=lambda item: (-item[1][0], item[0]))[:limit]
    return [
        (Path(client.download_artifacts(run_id, "candidate", _made(into / candidate))), ratio)
        for candidate, (ratio, run_id) in fastest
    ]


def _found(tracking_uri: str, campaign: str) -> tuple[Any, Any]:
    """(client, the campaign's own run)."""
    client = import_mlflow().MlflowClient(tracking_uri=tracking_uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for key in ("campaign_id", "campaign"):
        where = f"tags.{key} = '{campaign}' and tags.role = 'campaign'"
        runs = client.search_runs(experiments, where, max_results=1) if experiments else []
        if runs:
            return client, runs[0]
    raise InputError("campaign", campaign, "is not there", f"look at the campaigns of {tracking_uri}")


def _made(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)
