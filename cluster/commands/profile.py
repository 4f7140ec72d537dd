"""`hotpass profile`: where the time of a candidate goes, in a child that is discarded. Nothing is judged, nothing written to a ledger.

Exit 0, or 1 when the candidate fails. With --json the record is the only line on stdout.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from actors.spec import make_engine
from cluster.commands.try_candidate import deployment_plan
from cluster.machines import engine_spec
from cluster.plan import Plan
from cluster.trying import find_candidate, make_wanted
from engines.protocol import Engine, Profiles
from hotpass.decode import json_safe
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.measurement import Assignment, Purpose, Tier
from hotpass.records.profile import Profile, RowProfile, SlotTime

if TYPE_CHECKING:
    from rich.console import RenderableType

FOLDER = "profiles"
"""Where traces go unless `--trace` says otherwise."""


def run(arguments: argparse.Namespace) -> int:
    plan = deployment_plan(arguments)
    candidate = _wanted(arguments, plan)
    trace = arguments.trace or f"{FOLDER}/{trace_name(plan, candidate)}"
    engine = make_engine(engine_spec(plan), plan.deployment)
    try:
        found = _profiled(engine, plan, candidate, arguments.deadline, trace)
    finally:
        engine.close()
    if arguments.quiet:
        print(json.dumps(json_safe(found), ensure_ascii=False), flush=True)
    else:
        from rich.console import Console

        console = Console()
        for shown in describe(found, arguments.top):
            console.print(shown)
    return 0 if found.failure is None else 1


def trace_name(plan: Plan, candidate: Candidate) -> str:
    """As `smollm2-135m-as-loaded.json`."""
    named = "as-loaded" if candidate == AS_LOADED else candidate.short_id
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{Path(plan.spec.model).name}-{named}") + ".json"


def describe(found: Profile, top: int) -> Iterator[RenderableType]:
    """What a terminal shows."""
    yield f"[bold]{found.label}[/bold] on {found.engine}" + (" (simulated)" if found.simulated else "")
    for row in found.rows:
        yield f"\n[bold]{row.row.key}[/bold]: {row.step_ms:.3f} ms a step; under the profiler {row.profiled_ms:.3f} ms, {_gaps(row)}"
        yield _operators(row, top)
        yield _slots(row, top)
    for trace in found.traces:
        yield f"Chrome trace: {trace} (open in ui.perfetto.dev or chrome://tracing)"
    yield from (found.nsight, *found.notes)
    if found.failure is not None:
        yield f"[bold]failed[/bold] ({found.failure.kind}): {found.failure.message}"


def _gaps(row: RowProfile) -> str:
    share = row.gaps_ms / row.profiled_ms if row.profiled_ms else 0.0
    return f"{share:.0%} of it in {row.num_gaps:.0f} gaps between operators, the longest {row.longest_gap_ms:.3f} ms"


def _operators(row: RowProfile, top: int) -> RenderableType:
    from rich.table import Table

    table = Table("operator", box=None, header_style="dim")
    for name in ("calls", "self ms", "share"):
        table.add_column(name, justify="right")
    for item in row.operators[:top]:
        table.add_row(item.name, f"{item.calls:g}", f"{item.self_ms:.3f}", f"{item.share:.1%}")
    return table


def _slots(row: RowProfile, top: int) -> RenderableType:
    """The slots that take the most time by themselves, and the whole model first."""
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    table.add_column(
        "slot", no_wrap=True, overflow="fold", min_width=max((len(item.slot) for item in row.slots), default=0)
    )
    table.add_column("class", overflow="ellipsis", no_wrap=True)
    for name in ("calls", "ms", "self ms", "MB", "MFLOP", "bound ms", "x bound"):
        table.add_column(name, justify="right")
    slowest = sorted(row.slots, key=lambda item: (item.slot != "model", -item.self_ms))
    for item in slowest[: top + 1]:
        table.add_row(*_cells(item))
    return table


def _cells(item: SlotTime) -> list[str]:
    distance = item.distance
    return [
        item.slot + (" (part)" if item.by_part else ""),
        item.stands_for,
        f"{item.calls:g}",
        f"{item.ms:.3f}",
        f"{item.self_ms:.3f}",
        f"{item.bytes_moved / 1e6:.2f}",
        f"{item.flops / 1e6:.1f}",
        "-" if item.bound_ms is None else f"{item.bound_ms:.3f}",
        "-" if distance is None else f"{distance:.1f}",
    ]


def _profiled(engine: Engine, plan: Plan, candidate: Candidate, deadline_seconds: float, trace: str) -> Profile:
    if not isinstance(engine, Profiles):
        raise InputError("engine", plan.spec.engine, "cannot be profiled", "use --engine decoder, module or vllm")
    engine.load(plan.deployment, Tier.FAST)
    order = Assignment(
        incumbent=AS_LOADED,
        candidate=candidate,
        tier=Tier.FAST,
        purpose=Purpose.AUDIT,
        rows=plan.deployment.shapes.rows,
        seed=plan.spec.seed,
        deadline_seconds=deadline_seconds,
    )
    return engine.profile(order, trace)


def _wanted(arguments: argparse.Namespace, plan: Plan) -> Candidate:
    """As loaded, a path as `try` takes it, settings alone, or the id of a candidate of --in."""
    named = arguments.candidate
    if named is None and not arguments.settings:
        return AS_LOADED
    if named is not None and arguments.campaign_folder and not Path(named).exists():
        return find_candidate(Path(plan.spec.out), named)
    return make_wanted(named, arguments.settings, arguments.params, plan.deployment.model.dtype)
