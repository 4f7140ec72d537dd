"""A small campaign as a log, written by hand: what the mirror and the UI are tested on. Nothing in it was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.events import EventLog
from cluster.runs import CampaignFacts
from cluster.store import save_candidate
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, PartUse
from hotpass.records.measurement import Purpose, Tier, Verdict
from tests.search.builders import attempt, part

FACTS = CampaignFacts(
    name="tiny-chat",
    campaign_id="0123456789abcdef",
    experiment="hotpass · tiny · chat · cpu:test",
    dtype="float32",
    params={"model": "tiny", "traffic": "chat"},
)

WHOLE = part("whole", ["model"], params={"bits": (32, 4)})
MLP = part("mlp", ["model.layers.*.mlp"])


def candidate(bits: int = 32, threads: int | None = None) -> Candidate:
    settings = {} if threads is None else {"threads": threads}
    return Candidate(
        parts=(PartUse(source=WHOLE, params={"bits": bits}),), settings=settings, numerics=Numerics.TOLERANCE
    )


def proposal(made: Candidate, proposer: str = "screening") -> dict[str, Any]:
    return {
        "candidate_id": made.id,
        "label": made.label,
        "numerics": made.numerics,
        "proposer": proposer,
        "parents": [AS_LOADED.id],
        "hypothesis": "reads fewer bytes",
        "parts": [{"name": u.source.name, "sha256": u.source.sha256, "params": u.params} for u in made.parts],
        "settings": made.settings,
    }


def measurement(number: int, made_id: str, speedup: float, rows: int = 2, **facts: Any) -> dict[str, Any]:
    blocks = [
        {
            "row": {
                "phase": "decode", "num_seqs": n, "query_tokens": n, "context_mean": 256, "context_max": 300,
                "steps_share": 1 / rows, "tokens_share": 1 / rows,
            },
            "round_index": r, "order": "ABBA" if r % 2 == 0 else "BAAB", "incumbent_ms": [20.0 * n, 21.0 * n],
            "candidate_ms": [20.0 * n / speedup, 21.0 * n / speedup], "steps_per_window": 8, "child_clock_ratio": 1.0,
            "layers": 4,
        }
        for r in range(3)
        for n in range(1, rows + 1)
    ]  # fmt: skip
    result = {
        "engine": "engine-0",
        "environment": {"hardware_id": "h", "threads": 2, "thread_env": {}, "versions": {}, "cuda_visible_devices": ""},
        "blocks": blocks,
        "reloads": [{"phases_ms": {"prepare": 30.0, "swap": 2.0}}],
        "noise_floor": 0.01,
        "incumbent_disturbed": 1.01,
        "simulated": False,
        **facts,
    }
    return {
        "assignment": number, "candidate_id": made_id, "incumbent_id": AS_LOADED.id, "tier": "fast", "purpose": "search",
        "result": result,
    }  # fmt: skip


class Writer:
    """Appends a campaign's events with a clock that ticks two seconds an event."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1_800_000_000.0
        self.log = EventLog.open(folder / "events", clock=self._tick)
        self.number = sum(event.kind == "assignment" for event in self.log.read())

    def _tick(self) -> float:
        self.now += 2.0
        return self.now

    def try_candidate(
        self,
        made: Candidate,
        speedup: float | None = None,
        *,
        verdict: Verdict | None = None,
        tier: Tier = Tier.FAST,
        purpose: Purpose = Purpose.SEARCH,
        reason: str = "measured",
        max_abs: float = 1e-4,
        finish: bool = True,
    ) -> int:
        """Proposal, assignment, measurement, attempt; returns the attempt's seq (0 when `finish` is False)."""
        log, number = self.log, self.number
        save_candidate(self.folder, made)
        log.append("proposal", proposal(made))
        order = {
            "assignment": number, "candidate_id": made.id, "incumbent_id": AS_LOADED.id, "tier": tier, "purpose": purpose,
            "engine": "engine-0",
        }  # fmt: skip
        log.append("assignment", order)
        self.number += 1
        if not finish:
            log.sync()
            return 0
        if speedup is not None:
            log.append("measurement", measurement(number, made.id, speedup))
        judged = attempt(
            made.id,
            AS_LOADED.id,
            speedup,
            verdict=verdict,
            tier=tier,
            purpose=purpose,
            reason=reason,
            gates={"logits": "pass"},
        )
        payload = {
            "assignment": number,
            "attempt": {**_plain(judged), "numerics_measured": {"max_abs": max_abs, "kl_mean": 1e-6}},
            "speedup_vs_loaded": judged.speedup,
            "elapsed_seconds": self.now - 1_800_000_000.0,
        }
        return log.append_durable("attempt", payload)

    def baseline(self, name: str, speedup: float) -> None:
        payload = measurement(0, "", speedup)
        self.log.append_durable(
            "measurement",
            {
                "baseline": name, "numerics": "tolerance", "speedup": {"value": speedup, "low": speedup, "high": speedup},
                "tokens_per_second": 9.0 * speedup, "numerics_measured": {"max_abs": 0.74}, "failure": "",
                "result": payload["result"],
            },
        )  # fmt: skip

    def end(self) -> None:
        best = {
            "candidate": candidate(4).id, "tokens_per_s": 60.0, "bound_fraction": 0.7,
            "speedup_vs_loaded": {"value": 5.5, "ci95": [5.3, 5.7], "baseline": "as loaded"}, "speedup_vs_best_same_class": None,
        }  # fmt: skip
        self.log.append_durable("decision", {"decision": "result", "result": {"verdict": "faster", "best": best}})


def write_campaign(folder: Path, *, end: bool = True) -> Writer:
    """Baseline, A/A, seven candidates of every verdict, one cold."""
    writer = Writer(folder)
    writer.baseline("transformers-eager-bf16", 1.6)
    writer.try_candidate(AS_LOADED, 1.001, purpose=Purpose.AA)
    for made, speedup, verdict in (
        (candidate(), 2.8, None),
        (candidate(threads=1), 1.4, None),
        (candidate(4), 5.5, None),
        (candidate(4, 1), 1.01, None),
    ):
        writer.try_candidate(made, speedup, verdict=verdict)
    writer.try_candidate(candidate(4), 5.1, tier=Tier.SLOW)
    mlp = Candidate(parts=(PartUse(source=MLP),), numerics=Numerics.TOLERANCE)
    writer.try_candidate(mlp, verdict=Verdict.INCORRECT, reason="logits differ by inf", max_abs=math.inf)
    writer.try_candidate(
        Candidate(parts=(PartUse(source=MLP),), settings={"threads": 1}, numerics=Numerics.TOLERANCE),
        verdict=Verdict.FAILED,
        reason="the child died of signal 11",
    )
    writer.try_candidate(candidate(4), 5.5, purpose=Purpose.COLD)
    if end:
        writer.end()
    return writer


def _plain(record: object) -> dict[str, Any]:
    from hotpass.canonical import to_plain

    found: dict[str, Any] = to_plain(record)
    return found


def runs_of(tracking_uri: str) -> Iterator[Any]:
    """Every run of a tracking store."""
    from cluster.ledger import import_mlflow

    client = import_mlflow().MlflowClient(tracking_uri=tracking_uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    yield from client.search_runs(experiments, max_results=10_000)


def no_trouble(said: str) -> None:
    """For a mirror's notes: it may say how far MLflow is behind, and when it no longer is, and nothing else."""
    if "events behind" not in said and "has all of the campaign now" not in said:
        pytest.fail(said)
