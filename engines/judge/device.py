"""A measurement on a GPU, and what must be looked at there after it: clocks, the shared weights, the driver's own count of memory.

    conditions noted between rounds ── measurement ── keeper: are the weights as they were? ── NVML: is the child's memory?
                                                      └─ written again, told, the candidate marked      └─ else the child is replaced

On a CPU the measurement alone: weights are sealed there, and memory is in the fingerprint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engines.stable import Stable
from hotpass.records.measurement import CleanReport, MeasureResult

DRIVER_MARGIN_BYTES = 256 << 20
"""Growth of a child's device memory, by the driver's count, beyond which it is residue: code of kernels that are loaded when they are
first used stays too, and is no candidate's."""


def measured(stable: Stable, measure: Callable[[], MeasureResult]) -> MeasureResult:
    """The result of `measure`, with what a GPU adds to it. Raises MachineError where its memory does not hold what is written to it."""
    if stable.on_device is None:
        return measure()
    conditions = stable.watch_conditions()
    level = _level(stable)
    result = replace(_after(stable, measure()), gpu=conditions.record())
    return _grown(stable, result, level)


def _after(stable: Stable, result: MeasureResult) -> MeasureResult:
    """The weights as they were, whoever wrote to them."""
    start = time.perf_counter()
    found = stable.written_on_device()
    phases = {**result.phases_ms, "device weights": (time.perf_counter() - start) * 1e3}
    if not found.written:
        return replace(result, phases_ms=phases)
    stable.discard_pair()
    unclean = _unclean(result, f"{in_words(found.written)}; loaded again in {found.reload_ms:.0f} ms")
    return replace(unclean, weights_unchanged=False, phases_ms={**phases, "weights loaded again": found.reload_ms})


def in_words(written: Sequence[str]) -> str:
    """As `wrote to 3 shared weights (model.norm.weight, …)`."""
    more = ", …" if len(written) > 1 else ""
    return f"wrote to {len(written)} shared weight{'s' * (len(written) > 1)} ({written[0]}{more})"


def _level(stable: Stable) -> tuple[int, int | None]:
    """The pair child and its device memory as the driver counts it; no memory where that is not told."""
    pid = stable.pair().child.pid
    return pid, stable.monitored_bytes(pid)


def _grown(stable: Stable, result: MeasureResult, level: tuple[int, int | None]) -> MeasureResult:
    """What was allocated past torch, and is still there with the candidate gone."""
    pid, before = level
    if before is None or stable.pair().child.pid != pid:  # replaced meanwhile: it took its memory with it
        return result
    now = stable.monitored_bytes(pid)
    if now is None or now <= before + DRIVER_MARGIN_BYTES:
        return result
    stable.discard_pair()
    return _unclean(result, f"device memory grew by {(now - before) >> 20} MiB by the driver's count")


def _unclean(result: MeasureResult, reason: str) -> MeasureResult:
    known = result.clean.reasons if result.clean is not None else ()
    return replace(result, clean=CleanReport(clean=False, reasons=(*known, reason), child_replaced=True))
