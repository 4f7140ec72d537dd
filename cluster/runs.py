"""What MLflow shows of a campaign: names, tags, params and metrics of its runs, made from events. Pure; MLflow is not imported.

    attempt or baseline event ─► Story.run_of ─► RunContent      (a child run each)
    every event               ─► Story.apply  ─► series          (metrics of the campaign's own run)

Names are chosen for MLflow's tables and charts: those sort by name and group by what stands before a slash.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.events import Event
from cluster.plan import Plan
from hotpass.canonical import content_hash
from hotpass.decoders import NON_FINITE
from hotpass.records.candidate import AS_LOADED

NOTE = """\
One run a campaign, one child run an attempt (a candidate on one tier) or a baseline. Filter the table with \
`tags.role = 'campaign'`, `tags.role = 'attempt'`, `tags.verdict = 'faster'`, `tags.tier = 'slow'`, `tags.purpose = 'cold'`.

| column | meaning |
|---|---|
| `speedup` | over the deployment as loaded, chained through the incumbents; `speedup_low`, `speedup_high`: its interval |
| `speedup_vs_incumbent` | as paired in this attempt |
| `tokens_per_s` | of the candidate, over the deployment's shape table (fast tier) or by replay (slow tier) |
| `error/max_abs`, `error/…` | logits against the reference: the model file's own values in fp32 |
| `ms/<shape>` | median time of a step of that shape, candidate's side, deepest cut measured |
| `cost/reload_ms`, `cost/engine_s` | what installing and measuring took |
| `phase ms/…`, `reload ms/…`, `birth ms/…` | where the time went: of the measurement, of the candidate's reload, of children born for it |
| `verdict`, `reason` (tags) | faster, slower, inconclusive, incorrect, invalid, failed, and why |
| `tier`, `purpose` (tags) | fast or slow; search, remeasure, cold, audit, aa. Only a cold one is claimed |

A value that could not be measured is absent, never zero; a value that is not finite is a tag `not_finite/<metric>`.
The event log in the campaign's folder is the record; this is its mirror, and may lag behind it."""

COLUMNS = (
    "metrics.`speedup`", "metrics.`speedup_low`", "metrics.`speedup_high`", "metrics.`tokens_per_s`", "tags.`verdict`",
    "tags.`tier`", "tags.`purpose`", "tags.`numerics`", "metrics.`error/max_abs`", "metrics.`cost/reload_ms`",
    "tags.`proposer`", "tags.`reason`", "params.`incumbent`",
)  # fmt: skip
"""Of the prepared view: MLflow shows no metric of a run in its table unless a view names it."""

ATTEMPTS_VIEW, CAMPAIGNS_VIEW = "hotpass-attempts", "hotpass-campaigns"
"""Keys of the prepared views: `?viewStateShareKey=` in the address of the experiment."""

CHARTED = ("max_abs", "rms", "relative_rms", "kl_mean", "argmax_agreement")


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignFacts:
    """What the campaign's own run says about it."""

    name: str
    campaign_id: str
    """Unlike that of any other campaign, on a server shared by many."""
    experiment: str
    """Of the deployment: campaigns that can be compared share it."""
    dtype: str
    """Declared dtype of the model, a column of the measured passes."""
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContent:
    """One child run, complete."""

    seq: int
    """Of the event that it mirrors; its identity within the campaign."""
    name: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    """Finite ones only."""
    step: int
    """Number of the attempt: the x axis of charts."""
    candidate_id: str
    """Whose sources belong to it; empty for a baseline."""
    start_ms: int
    end_ms: int
    failed: bool
    """True when the candidate did not run: MLflow shows FAILED instead of FINISHED."""


@dataclass(slots=True, kw_only=True)
class Story:
    """What must be remembered of earlier events to tell a later one. `apply` each event in order."""

    proposals: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    orders: dict[int, Event] = field(default_factory=dict)
    """Assignments without an attempt yet."""
    measured: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Results of those."""
    attempts: int = 0
    best: float = 1.0
    """Largest speedup over as loaded of an attempt that was faster."""
    result: Mapping[str, Any] | None = None
    """The JSON line that ends a campaign; None before it."""

    def apply(self, event: Event) -> dict[str, tuple[float, int]]:
        """Take an event in; returns (value, step) of the campaign's own metrics that it adds to."""
        payload = event.payload
        if event.kind == "proposal":
            self.proposals.setdefault(payload["candidate_id"], payload)
        elif event.kind == "assignment":
            self.orders[int(payload["assignment"])] = event
        elif event.kind == "measurement" and "baseline" not in payload:
            self.measured[int(payload["assignment"])] = payload["result"]
        elif event.kind == "decision":
            self.result = payload["result"] if payload["decision"] == "result" else self.result
            if payload["decision"] == "start":
                return _startup(payload)
        elif event.kind == "attempt":
            return self._apply_attempt(payload)
        return {}

    def _apply_attempt(self, payload: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
        number, attempt = int(payload["assignment"]), payload["attempt"]
        order = self.orders.pop(number, None)
        result = self.measured.pop(number, {})
        if attempt["purpose"] == "aa":
            return {}
        self.attempts += 1
        speedup = _number((payload["speedup_vs_loaded"] or {}).get("value"))
        series = {f"by attempt/ms {shape}": ms for shape, ms in medians(result.get("blocks", ())).items()}
        if speedup is not None:
            series["by attempt/speedup"] = speedup
            if attempt["verdict"] == "faster":
                self.best = max(self.best, speedup)
        series["best so far/speedup"] = self.best
        if order is not None and "elapsed_seconds" in payload:
            series["by attempt/minutes"] = payload["elapsed_seconds"] / 60
        return {name: (value, self.attempts) for name, value in series.items() if math.isfinite(value)}

    def run_of(self, event: Event) -> RunContent | None:
        """The child run of an event, before `apply` has taken it in; None for an event that has none."""
        if event.kind == "attempt":
            return self._attempt_run(event)
        if event.kind == "measurement" and "baseline" in event.payload:
            return self._baseline_run(event)
        return None

    def _attempt_run(self, event: Event) -> RunContent:
        attempt, number = event.payload["attempt"], int(event.payload["assignment"])
        candidate_id = attempt["candidate_id"]
        proposal, result = self.proposals.get(candidate_id, {}), self.measured.get(number, {})
        order = self.orders.get(number)
        label = proposal.get("label", AS_LOADED.label if candidate_id == AS_LOADED.id else candidate_id[:10])
        speedup, own = event.payload["speedup_vs_loaded"] or {}, attempt["speedup"] or {}
        checked = attempt["numerics_measured"]
        values = {
            "speedup": speedup.get("value"),
            "speedup_low": speedup.get("low"),
            "speedup_high": speedup.get("high"),
            "speedup_vs_incumbent": own.get("value"),
            "tokens_per_s": attempt["tokens_per_second"],
            **{f"{name}_vs_incumbent": ratio for name, ratio in attempt.get("ratios", {}).items()},
            **{f"error/{name}": checked[name] for name in CHARTED if name in checked},
            **{f"ms/{shape}": ms for shape, ms in medians(result.get("blocks", ())).items()},
            "cost/reload_ms": sum(sum(reload["phases_ms"].values()) for reload in result.get("reloads", ())) or None,
            "cost/engine_s": attempt["seconds"],
            **phase_metrics(result),
            "measuring/rounds": attempt["rounds"],
            "measuring/noise_floor": result.get("noise_floor"),
            "measuring/incumbent_disturbed": result.get("incumbent_disturbed"),
        }
        metrics, not_finite = _finite(values)
        prefix = {"cold": "cold · ", "aa": "A/A · ", "remeasure": "again · ", "audit": "audit · "}.get(
            attempt["purpose"], ""
        )
        step = self.attempts + (attempt["purpose"] != "aa")
        return RunContent(
            seq=event.seq,
            name=f"{prefix}{label}" + (" · slow" if attempt["tier"] == "slow" and not prefix else ""),
            tags={
                "role": "aa" if attempt["purpose"] == "aa" else "attempt",
                "verdict": attempt["verdict"],
                "reason": attempt["reason"],
                "tier": attempt["tier"],
                "purpose": attempt["purpose"],
                "numerics": proposal.get("numerics", "bit-identical"),
                "proposer": proposal.get("proposer", ""),
                "kind": own.get("kind", ""),
                "gates": ", ".join(f"{name}: {said}" for name, said in attempt["gates"].items()),
                "hypothesis": proposal.get("hypothesis", ""),
                "engine": result.get("engine", order.payload["engine"] if order else ""),
                **not_finite,
            },
            params={
                "candidate": candidate_id[:10],
                "incumbent": attempt["incumbent_id"][:10],
                "parts": " + ".join(_part_text(part) for part in proposal.get("parts", ())) or "none",
                **{f"set {name}": str(value) for name, value in proposal.get("settings", {}).items()},
            },
            metrics=metrics,
            step=step,
            candidate_id=candidate_id,
            start_ms=round((order.time if order else event.time) * 1000),
            end_ms=round(event.time * 1000),
            failed=attempt["verdict"] == "failed",
        )

    def _baseline_run(self, event: Event) -> RunContent:
        payload = event.payload
        speedup = payload["speedup"] or {}
        checked = payload["numerics_measured"]
        metrics, not_finite = _finite(
            {
                "speedup": speedup.get("value"),
                "speedup_low": speedup.get("low"),
                "speedup_high": speedup.get("high"),
                "tokens_per_s": payload["tokens_per_second"],
                **{f"error/{name}": checked[name] for name in CHARTED if name in checked},
                **{f"ms/{shape}": ms for shape, ms in medians(payload["result"].get("blocks", ())).items()},
            }
        )
        return RunContent(
            seq=event.seq,
            name=f"baseline · {payload['baseline']}",
            tags={
                "role": "baseline",
                "verdict": "failed" if payload["failure"] else "baseline",
                "reason": payload["failure"],
                "tier": "fast",
                "purpose": "baseline",
                "numerics": payload["numerics"],
                "kind": speedup.get("kind", ""),
                **not_finite,
            },
            params={"parts": payload["baseline"]},
            metrics=metrics,
            step=0,
            candidate_id="",
            start_ms=round(event.time * 1000),
            end_ms=round(event.time * 1000),
            failed=bool(payload["failure"]),
        )


def facts_of(plan: Plan) -> CampaignFacts:
    """What the campaign's run says, from its resolved plan."""
    deployment, spec = plan.deployment, plan.spec
    model, traffic, hardware = deployment.model, deployment.traffic, deployment.hardware
    return CampaignFacts(
        name=plan.campaign,
        campaign_id=content_hash([plan.campaign, plan.created, deployment.id])[:16],
        experiment=f"hotpass · {model.name} · {traffic.name} · {hardware.name}",
        dtype=model.dtype,
        params={
            "model": model.name,
            "dtype": model.dtype,
            "traffic": traffic.name,
            "concurrency": str(deployment.concurrency),
            "hardware": hardware.name,
            "devices": str(hardware.num_devices),
            "numerics allowed": spec.numerics,
            "budget": spec.budget,
            "seed": str(spec.seed),
            "engine": spec.engine,
            **{f"version {name}": version for name, version in plan.versions.items()},
        },
        tags={"deployment": deployment.id[:16], "command": " ".join(plan.command)},
    )


def prepared_views() -> dict[str, dict[str, Any]]:
    """States of MLflow's table of runs, by key: all attempts, fastest first; and one row a campaign, with its charts."""
    columns = ["attributes.`Run Name`", *COLUMNS]
    attempts = {
        "selectedColumns": columns,
        "searchFilter": "tags.role != 'campaign'",
        "orderByKey": "metrics.`speedup`",
        "orderByAsc": False,
    }
    # MLflow nests children under their parent only in its own order, by start time.
    campaigns = {"selectedColumns": columns, "orderByKey": "attributes.start_time", "orderByAsc": False}
    return {ATTEMPTS_VIEW: attempts, CAMPAIGNS_VIEW: campaigns}


def medians(blocks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Shape → median ms of a step on the candidate's side, of the deepest model that was run."""
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for block in blocks:
        row = block["row"]
        shape = f"{row['phase']} n{row['num_seqs']} q{row['query_tokens']} c{row['context_mean']}"
        times[shape][block["layers"]] += [float(ms) for ms in block["candidate_ms"]]
    return {shape: statistics.median(by_depth[max(by_depth)]) for shape, by_depth in times.items()}


def phase_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Where the time of one measurement went: by phase of its own, of the candidate's reload, and of children born for it."""
    values: dict[str, float] = defaultdict(float)
    for name, ms in result.get("phases_ms", {}).items():
        values[f"birth ms/{name.removeprefix('birth/')}" if name.startswith("birth/") else f"phase ms/{name}"] = ms
    for reload in result.get("reloads", ()):
        if reload.get("side", "candidate") == "candidate":
            for name, ms in reload["phases_ms"].items():
                values[f"reload ms/{name}"] += ms
    return dict(values)


def result_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """What the campaign claims, as metrics of its own run: only of the best that was measured cold."""
    best = result.get("best") or {}
    values = {f"claim/{name}": best.get(name) for name in ("tokens_per_s", "bound_fraction")}
    values["tokens_per_s"] = best.get("tokens_per_s")
    for name in ("speedup_vs_loaded", "speedup_vs_best_same_class", "speedup_vs_best_as_accurate"):
        claim = best.get(name) or {}
        values[f"claim/{name}"] = claim.get("value")
        low_high = claim.get("ci95") or (None, None)
        values[f"claim/{name}_low"], values[f"claim/{name}_high"] = low_high
        if name == "speedup_vs_loaded":  # in the columns of the attempts too, so that the campaign's row is not empty
            values |= {"speedup": claim.get("value"), "speedup_low": low_high[0], "speedup_high": low_high[1]}
    return _finite(values)[0]


def _startup(payload: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """Start-up of each engine by phase, a step a session."""
    session = int(payload.get("session", 1))
    return {
        f"startup ms/{engine} {phase}": (float(ms), session)
        for engine, phases in payload.get("startup_ms", {}).items()
        for phase, ms in phases.items()
    }


def _part_text(part: Mapping[str, Any]) -> str:
    params = ", ".join(f"{name}={value}" for name, value in sorted(part["params"].items()))
    return f"{part['name']}({params})" if params else str(part["name"])


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return NON_FINITE.get(value)
    return None if value is None else float(value)


def _finite(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Finite values; and a tag for each that is not. What is None is in neither."""
    finite: dict[str, float] = {}
    not_finite: dict[str, str] = {}
    for name, value in values.items():
        number = _number(value)
        if number is not None and math.isfinite(number):
            finite[name] = number
        elif number is not None:
            not_finite[f"not_finite/{name}"] = str(number)
    return finite, not_finite
