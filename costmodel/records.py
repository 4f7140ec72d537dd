"""What is asked of `plan` and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from costmodel.interval import Interval
from costmodel.serving import Load
from costmodel.simulate import Job

if TYPE_CHECKING:
    import pandas as pd

    from costmodel.calibration import Corrections
    from costmodel.operators.own import OwnTables

SERVING_SPREAD = {"tpot": 0.35, "ttft": 1.0}
"""Standard deviation of log time beyond the operators': host work, schedulers, load imbalance; queueing for the first token. From the
errors on the published rows (docs/cost-model.md), so that an interval that nobody calibrated is wide enough."""


class Objective(StrEnum):
    """What a plan is ranked by."""

    THROUGHPUT = "throughput"
    """Output tokens a second of each accelerator."""
    LATENCY = "latency"
    """Time of a whole answer."""
    GOODPUT = "goodput"
    """Requests a second that hold the SLO, simulated, of each accelerator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Limits and settings of a planning question."""

    concurrency: int | None = None
    """Clients in all; None: whatever suits each plan."""
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    objective: Objective = Objective.THROUGHPUT
    price_per_gpu_hour: float | None = None
    """In the user's currency; None: no costs."""
    backend: str = "vllm"
    """Whose kernel tables answer."""
    precision: str | None = None
    """Weight format; None: as shipped."""
    kv_bytes: float = 2.0
    """Of a cached value: 2 for bf16, 1 for fp8."""
    chunk_tokens: int = 8192
    """Prompt tokens of one step."""
    disaggregated: bool = True
    """Consider prefill and decode on different accelerators too."""
    simulate: bool = True
    """Play the best plans event by event."""
    jobs: tuple[Job, ...] = ()
    """The trace's requests, for the simulation; empty: all at the mean."""
    block_tokens: int = 0
    """Tokens of a block of the trace's prefixes; 0: no prefix cache."""
    kernels: OwnTables | None = None
    """Timed on the hardware at hand; they answer instead of the published tables."""
    corrections: Corrections | None = None
    """Learned from measured rows; None: as the sources say."""

    def played(self, load: Load, count: int) -> list[Job]:
        """`count` requests, the trace's own over and over."""
        source = self.jobs or (Job(input_tokens=round(load.input_tokens), output_tokens=round(load.output_tokens)),)
        return [source[i % len(source)] for i in range(count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One plan, predicted."""

    name: str
    """As `2x(tp4 ep4) c64`: replicas, layout, clients of one replica."""
    index: int
    """Of the decode layout in the grid of this answer."""
    gpus: int
    replicas: int
    concurrency: int
    """Clients of one replica (of all decode workers where prefill is apart)."""
    layout: Mapping[str, int]
    ttft_ms: Interval
    tpot_ms: Interval
    tokens_per_s_per_user: Interval
    tokens_per_s_per_gpu: Interval
    """Output tokens."""
    memory_gb_per_gpu: float
    cost_per_million_input: Interval | None
    cost_per_million_output: Interval | None
    """The accelerators' price, charged by the time that prefill and decode take; as wide as the rate. None without a price."""
    source: str
    """The weakest source of a tenth or more of a step."""
    unvalidated: tuple[str, ...]
    """Kinds of parallelism here that were never compared with measurements."""
    prefill_index: int | None = None
    """Of the prefill layout, where prefill is apart."""
    simulated: Mapping[str, float] | None = None
    """What the discrete simulation says; None where it was not played."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRow:
    """One operator of a step, explained."""

    phase: str
    operator: str
    kind: str
    milliseconds: float
    share: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanResult:
    """The answer of `plan`."""

    model: str
    hardware: str
    source: str
    asked: Asked
    load: Load
    plans: tuple[Plan, ...]
    """Ranked; one for each layout and number of replicas, at its best batch."""
    frontier: tuple[tuple[str, float, float], ...]
    """(plan, tokens/s/user, tokens/s/GPU) that no other plan beats in both; the SLO aside."""
    considered: int
    pruned: Mapping[str, int]
    """Reason → plans left out for it."""
    next_measurement: str | None
    """The plan whose measurement would narrow the choice most; None without plans."""
    fewest_gpus: int | None
    """That hold the SLO; None when nothing does."""
    disputed: tuple[str, ...]
    """Figures of the hardware that sources disagree about."""
    notes: tuple[str, ...]

    def dataframe(self) -> pd.DataFrame:
        """One row for each plan."""
        import pandas as pd

        rows = []
        for made in self.plans:
            row: dict[str, object] = {
                "plan": made.name,
                "gpus": made.gpus,
                "concurrency": made.concurrency,
                **made.layout,
            }
            for name in ("ttft_ms", "tpot_ms", "tokens_per_s_per_user", "tokens_per_s_per_gpu"):
                interval: Interval = getattr(made, name)
                row |= {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
            row |= {
                "memory_gb_per_gpu": made.memory_gb_per_gpu,
                "source": made.source,
            }
            for name in ("cost_per_million_input", "cost_per_million_output"):
                cost: Interval | None = getattr(made, name)
                row |= {name: cost and cost.value, f"{name}_low": cost and cost.low, f"{name}_high": cost and cost.high}
            rows.append(row)
        return pd.DataFrame(rows)
