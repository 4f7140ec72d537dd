"""What a profile says: where the time of a step goes, by operator and by slot, and how far from the machine's limits it is.

A profile is taken outside of every timed window, in a child that is discarded afterwards. Nothing in it decides a verdict: a profiler
slows what it watches, so its shares are to be believed more than its milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotpass.records.measurement import Failure
from hotpass.records.shapes import ShapeRow


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTime:
    """One operator of torch, over all its calls."""

    name: str
    """As `aten::addmm`; on a GPU the kernel's."""
    calls: float
    """A step."""
    self_ms: float
    """A step, without the operators that it calls, under the profiler."""
    share: float
    """Of the profiled step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotTime:
    """One slot: its time, and the least work that its place in the model asks for."""

    slot: str
    stands_for: str
    """Class that it holds."""
    calls: float
    """A step."""
    ms: float
    """A step, everything below it included, without the profiler."""
    self_ms: float
    """The same without the slots below it."""
    by_part: bool
    """Whether a part of the candidate serves it."""
    bytes_moved: int
    """A step, at least: its weights (of an embedding the rows looked up), KV, inputs and outputs, each once; as loaded."""
    flops: int
    """A step, as loaded: two for each multiply-add."""
    bound_ms: float | None
    """Least time for that work at this machine's measured rates; None where they were not measured."""

    @property
    def distance(self) -> float | None:
        """Time over the bound: 1 is the roofline."""
        return self.ms / self.bound_ms if self.bound_ms else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowProfile:
    """One shape row."""

    row: ShapeRow
    steps: int
    """Steps that each figure is the mean of."""
    step_ms: float
    """A step without the profiler, by the child's clock (median)."""
    profiled_ms: float
    """A step under the profiler."""
    gaps_ms: float
    """Of the profiled step, time in which no operator and no part ran: Python, dispatch, waiting."""
    num_gaps: float
    """A step."""
    longest_gap_ms: float
    operators: tuple[OperatorTime, ...]
    """The slowest first."""
    slots: tuple[SlotTime, ...]
    """In the order of the slot table; those that did not run are left out."""

    @property
    def whole(self) -> SlotTime | None:
        """The slot of the whole model."""
        return next((item for item in self.slots if item.slot == "model"), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """All that came of profiling a candidate."""

    engine: str
    """Name of the engine."""
    candidate_id: str
    label: str
    """The candidate, readable."""
    rows: tuple[RowProfile, ...] = ()
    """Those asked for; fewer when the candidate failed."""
    traces: tuple[str, ...] = ()
    """Chrome traces (chrome://tracing, ui.perfetto.dev), one a row; empty when none were asked for."""
    nsight: str = ""
    """Where Nsight Systems is on this machine and how to use it, or that it is not there."""
    notes: tuple[str, ...] = ()
    """What the reader must know: rates that were not measured, slots that cannot be seen into."""
    simulated: bool = False
    """True for the fake engine only."""
    failure: Failure | None = None
    """How the candidate failed meanwhile."""
