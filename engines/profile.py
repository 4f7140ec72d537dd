"""Profiles as the judge takes them: a fresh child, the candidate on it, rows one by one, then the child is gone.

    fresh child ─► install ─► each row: figures and trace by the child ─► bounds from this machine's rates ─► Profile

Nothing here is timed by the judge, and nothing of it reaches a verdict.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.client import Child, token_bytes
from engines.judge.inputs import seed_of, window_tokens
from engines.judge.install import Installer
from engines.judge.rounds import Place
from engines.probe import physical_floor_ms
from engines.program import CandidateFailed
from engines.stable import Stable, machine_fault
from engines.wire import close_all
from hotpass.errors import MachineError
from hotpass.records.deployment import HardwareRef
from hotpass.records.measurement import Assignment, Side
from hotpass.records.profile import OperatorTime, Profile, RowProfile, SlotTime
from hotpass.records.shapes import ShapeRow
from hotpass.records.slots import SlotTable

MOST_TRACE_BYTES = 1 << 28


def profile(
    stable: Stable,
    installer: Installer,
    assignment: Assignment,
    *,
    engine: str,
    table: SlotTable,
    hardware: HardwareRef,
    cut: int,
    trace_path: str = "",
) -> Profile:
    """The assignment's candidate on its rows of the cut. `trace_path` names the Chrome traces: the row's number comes before its suffix.

    The candidate's fault is in the record; raises MachineError for the machine's.
    """
    known = [row.key for row in stable.recipe.rows]
    places = [(cut, known.index(row.key)) for row in assignment.rows]
    with machine_fault("a fresh child"):
        child = stable.fresh_child()
    rows: list[RowProfile] = []
    traces: list[str] = []
    unseen, failure = 0, None
    with child:
        try:
            deadline = time.monotonic() + assignment.deadline_seconds
            for side in Side:
                stable.load_contexts(child, side.value, places, deadline)
            installer.install(child, Side.CANDIDATE, assignment.candidate, places, deadline)
            for place in places:
                figures, trace = _row(stable, child, place, table, assignment.seed, deadline)
                rows.append(_decoded(child, stable.recipe.rows[place[1]], figures, table, hardware))
                unseen = max(unseen, int(figures["unseen"]))
                if trace_path:
                    traces.append(_written(trace, trace_path, place[1], len(places)))
        except CandidateFailed as error:
            failure = error.failure
    return Profile(
        engine=engine,
        candidate_id=assignment.candidate.id,
        label=assignment.candidate.label,
        rows=tuple(rows),
        traces=tuple(traces),
        nsight=nsight(),
        notes=_notes(rows, unseen),
        failure=failure,
    )


def nsight() -> str:
    """Whether Nsight Systems can be used here."""
    found = shutil.which("nsys")
    if found is None:
        return "Nsight Systems (nsys) is not on PATH: the trace is torch's own"
    return f"Nsight Systems is at {found}: run `nsys profile hotpass profile …` for the device's own timeline"


def _row(
    stable: Stable, child: Child, place: Place, table: SlotTable, seed: int, deadline: float
) -> tuple[dict[str, Any], bytes]:
    cut, row = place
    source = stable.recipe.sources(seed_of(seed, "profile"), False)
    tokens = window_tokens(source, stable.kv, row)
    body = {"side": Side.CANDIDATE.value, "cut": cut, "row": row, "steps": len(tokens), "slots": table.names()}
    message = child.call("profile", body, deadline=deadline, blob=token_bytes(tokens))
    try:
        return dict(message.body), _read(message.fds[0])
    except (IndexError, TypeError, OSError):
        raise child.broken("the child's profile is not one") from None
    finally:
        close_all(message.fds)


def _read(fd: int) -> bytes:
    size = min(os.fstat(fd).st_size, MOST_TRACE_BYTES)
    return os.pread(fd, size, 0)


def _decoded(
    child: Child, row: ShapeRow, figures: Mapping[str, Any], table: SlotTable, hardware: HardwareRef
) -> RowProfile:
    classes = {slot.name: slot.stands_for for slot in table.slots}
    try:
        slots = [
            SlotTime(
                **{name: item[name] for name in _OF_A_SLOT},
                stands_for=classes[item["slot"]],
                bound_ms=_bound(hardware, item) if item["known"] else None,
            )
            for item in figures["slots"]
        ]
        return RowProfile(
            row=row,
            slots=tuple(slots),
            operators=tuple(OperatorTime(**item) for item in figures["operators"]),
            **{name: figures[name] for name in _FIGURES},
        )
    except (KeyError, TypeError, ValueError):  # written by a process that ran a candidate
        raise child.broken("the child's profile is not one") from None


_OF_A_SLOT = ("slot", "calls", "ms", "self_ms", "by_part", "bytes_moved", "flops")
_FIGURES = ("steps", "step_ms", "profiled_ms", "gaps_ms", "num_gaps", "longest_gap_ms")


def _bound(hardware: HardwareRef, item: Mapping[str, Any]) -> float | None:
    """Least ms for the slot's bytes and FLOPs, at the rate of the wider type: a bound that a candidate may beat by narrowing."""
    work = float(item["bytes_moved"]), float(item["flops"])
    return physical_floor_ms(hardware, weight_bytes=work[0], flops=work[1]) or None


def _written(trace: bytes, path: str, row: int, rows: int) -> str:
    place = Path(path)
    if rows > 1:
        place = place.with_name(f"{place.stem}-{row}{place.suffix or '.json'}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(trace)
    except OSError as error:
        raise MachineError(f"{place} cannot be written ({error.strerror})") from None
    return str(place)


def _notes(rows: Sequence[RowProfile], unseen: int) -> tuple[str, ...]:
    notes = ["a profiler slows what it watches: believe its shares more than its milliseconds"]
    bounds = [slot.bound_ms is None for row in rows for slot in row.slots]
    if any(bounds) and not all(bounds):
        notes.append("no distance from the roofline for slots whose least work is not known")
    elif any(bounds):
        notes.append(
            "this machine's rates were not measured, or while others ran, so there is no distance from the roofline"
        )
    if unseen:
        notes.append(f"{unseen} slots lie inside compiled code and cannot be told apart")
    return tuple(notes)
