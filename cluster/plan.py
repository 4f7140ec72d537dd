"""The resolved configuration of a campaign: everything that was looked up, once, and written to `campaign.json`.

Whoever comes later (resume, report, API, `hotpass try` against it) reads this file and resolves nothing again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster.spec import CampaignSpec
from hotpass.decode import DecodeError, from_plain, json_safe
from hotpass.errors import InputError
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Stopping

FILE = "campaign.json"
SCHEMA = 1
SPARE_CORES = 2
"""Physical cores beyond the engine's threads from which a builder may run while an engine measures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How a budget is spent. Times are campaign time in seconds."""

    own: Stopping
    """Of the A/A row."""
    fast: Stopping
    slow: Stopping
    cold: Stopping
    fast_deadline_seconds: float
    slow_deadline_seconds: float
    cold_deadline_seconds: float
    reserve_seconds: float
    """Of the budget, kept for measuring the finalists cold, for the gates and the release."""
    num_finalists: int
    """Candidates measured cold, at most."""
    replay_requests: int
    """Requests of one replay on the slow tier."""
    replay_output_tokens: int
    """Only requests with at most so many output tokens are replayed; 0 for all. Long answers are for long budgets."""
    pool_sets: int = 4
    """Input sets a row with answers of the reference, which an engine computes at its load, each a step in fp32 or several. What a
    candidate answers to others is compared with the incumbent's answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """What a campaign took over from an earlier one."""

    folder: str
    candidate: Candidate
    """Its winner (or last incumbent): proposed first here."""
    traffic: str
    """Name of its traffic."""
    shape_distance: float
    """Between its shape table and this one's, 0 (same steps) to 1 (`hotpass.traffic.distance`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A campaign, resolved."""

    campaign: str
    """Its name: that of its folder."""
    created: str
    """UTC time, ISO 8601."""
    spec: CampaignSpec
    deployment: Deployment
    pace: Pace
    versions: Mapping[str, str]
    """python, ray, torch, hotpass of the process that resolved it."""
    command: tuple[str, ...] = ()
    """The command line that started it; empty from Python."""
    continued: Continued | None = None
    plans: tuple[Mapping[str, int], ...] = ({},)
    """Plans of parallelism beside settings in the space, as loaded first: those that survived the cost model and that the engine can run
    (`cluster.surviving`)."""
    notes: tuple[str, ...] = field(default=())
    """Sentences that the user must know: requests dropped, slots or parts that do not apply, lengths-only text."""


HOPELESS = 0.5
"""Of the search: a candidate at 0.6 of the incumbent's speed or less is given up after a round. A brief round's log ratio varies by five to
fifteen hundredths; on a machine so busy that it varies by more, a good candidate may be given up, and none may be promoted by it."""


COMPILES_FROM = 600.0
"""Seconds of a budget from which compile modes are searched: on two cores one took 35 s to build and 24 to measure."""


def table_rows(budget_seconds: float) -> int:
    """Rows of the shape table: fewer for a small budget, since every round measures each of them four times on both sides."""
    return 4 if budget_seconds < 900 else 6


def settings_left_out(spec: CampaignSpec) -> dict[str, str]:
    """Setting → why a search of that budget does not try it; whoever asks about one candidate may. A module has little else to try, and
    vLLM compiles as it is loaded."""
    if spec.budget_seconds >= COMPILES_FROM or spec.engine != "decoder":
        return {}
    return {"compile_mode": f"compiling takes a minute a candidate, and the budget is below {COMPILES_FROM / 60:.0f}"}


def pace_for(budget_seconds: float) -> Pace:
    """A pace that leaves room for about thirty attempts in five minutes, and grows with the budget.

    Rounds are few in the search, where a wrong promotion costs only time, and many in the cold measurement, which is what is
    claimed. Deadlines catch candidates that hang; a healthy attempt is several times faster.
    """
    scale = max(0.2, min(4.0, budget_seconds / 300))
    own_rounds = 4 if scale < 2 else 12  # a window a side each: more rounds say more about the noise than longer ones
    return Pace(
        own=Stopping(alpha=0.02, min_rounds=own_rounds, max_rounds=own_rounds),
        fast=Stopping(
            alpha=0.02,
            min_rounds=3,
            max_rounds=round(12 * max(1.0, scale)),
            half_width=0.03,
            equal_margin=0.02,
            hopeless=HOPELESS,
            far_behind=HOPELESS,
        ),
        slow=Stopping(
            alpha=0.05, min_rounds=3, max_rounds=max(3, round(4 * scale)), half_width=0.05, equal_margin=0.02
        ),
        cold=Stopping(
            alpha=0.05, min_rounds=5, max_rounds=round(16 * max(1.0, scale)), half_width=0.02, equal_margin=0.01
        ),
        fast_deadline_seconds=max(10.0, 45 * min(1.0, scale)),
        slow_deadline_seconds=max(15.0, 60 * scale),
        cold_deadline_seconds=max(20.0, 60 * scale),
        reserve_seconds=budget_seconds * 0.15,
        num_finalists=2 if scale < 2 else 3,
        replay_requests=2 if scale < 2 else 4,
        replay_output_tokens=32 if scale < 2 else (128 if scale < 4 else 0),
        pool_sets=2 if scale < 2 else 4,
    )


def may_build_ahead(plan: Plan) -> bool:
    """A compiler beside a measurement raised its noise sevenfold on two cores, so only where there are cores to spare."""
    hardware = plan.deployment.hardware
    return (
        hardware.device == "cuda" or hardware.num_devices - (plan.spec.threads or hardware.num_devices) >= SPARE_CORES
    )


def write_plan(folder: Path, plan: Plan) -> None:
    """Atomically, so that a campaign folder has a whole plan or none."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, "plan": json_safe(plan)}, indent=1, ensure_ascii=False)
    temporary = folder / f".{FILE}.{os.getpid()}"
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(folder / FILE)


def read_plan(folder: Path) -> Plan:
    """Raises InputError when the folder is no campaign, or was written by another version."""
    path = folder / FILE
    if not path.is_file():
        raise InputError("campaign", folder, f"has no {FILE}", "give the folder that `hotpass compile` printed")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return from_plain(Plan, content["plan"])
    except (ValueError, KeyError, DecodeError) as error:
        raise InputError(
            "campaign", path, f"cannot be read: {error}", "use the hotpass version that wrote it"
        ) from None
