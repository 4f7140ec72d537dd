"""The null battery: outputs that must fail a gate, and two that must pass, tried on each gate before it is trusted.

A gate that lets one of the nulls through, or rejects an honest reordering, blocks the campaign (`BatteryFailed`). The nulls are made from
the engine's own reference logits, so a tolerance above the output's scale, a comparison that NaN passes, or a mean that hides one
row is found on the very workload it would be used on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hotpass.errors import HotpassError
from hotpass.records.candidate import Numerics

Logits = NDArray[np.float32]
"""[rows, vocab]."""
Gate = Callable[[Logits, Logits], bool]
"""(reference, output) → passes."""


class BatteryFailed(HotpassError):
    """A gate is blind or deaf on this workload."""


NULLS: dict[str, Callable[[Logits, np.random.Generator], Logits]] = {
    "zeros": lambda ref, rng: np.zeros_like(ref),
    "constant": lambda ref, rng: np.full_like(ref, ref.mean()),
    "mean row": lambda ref, rng: np.broadcast_to(ref.mean(axis=0), ref.shape).copy(),
    "shuffled vocabulary": lambda ref, rng: np.ascontiguousarray(ref[:, rng.permutation(ref.shape[1])]),
    "stale (previous row)": lambda ref, rng: np.roll(ref, 1, axis=0),
    "one bad row": lambda ref, rng: _with_row(ref, np.zeros_like(ref[0])),
    "one NaN": lambda ref, rng: _with_value(ref, np.nan),
    "one infinity": lambda ref, rng: _with_value(ref, np.inf),
    "noise of the same scale": lambda ref, rng: rng.normal(ref.mean(), ref.std(), ref.shape).astype(np.float32),
    "truncated vocabulary": lambda ref, rng: _truncated(ref),
    "coarse (3 bits)": lambda ref, rng: _coarse(ref, 8),
}
"""What no class may pass."""

NARROWED: dict[str, Callable[[Logits, np.random.Generator], Logits]] = {
    "float16 downcast": lambda ref, rng: np.asarray(ref.astype(np.float16), dtype=np.float32),
    "bfloat16 downcast": lambda ref, rng: _bfloat16(ref),
}
"""What only `lossy` may pass."""


def run_battery(reference: Logits, reordered: Logits, gates: dict[Numerics, Gate], seed: int = 0) -> dict[str, str]:
    """Try every null on every gate. Returns what was tried; raises BatteryFailed naming gate and null.

    `reordered` is the reference's own output with its sums in another order; the gates of `tolerance` and `lossy` must pass it.
    """
    if reference.shape[0] < 2:
        raise BatteryFailed("the null battery needs at least two rows of logits")
    rng = np.random.default_rng(seed)
    tried: dict[str, str] = {}
    for numerics, gate in gates.items():
        nulls = dict(NULLS) if numerics is Numerics.LOSSY else {**NULLS, **NARROWED}
        for name, make in nulls.items():
            if gate(reference, make(reference, rng)):
                raise BatteryFailed(f"the {numerics} gate lets '{name}' pass on this workload")
            tried[f"{numerics}: {name}"] = "rejected"
        honest = {"the reference itself": reference}
        if numerics is not Numerics.BIT_IDENTICAL:
            honest["the reference in another order"] = reordered
        for name, output in honest.items():
            if not gate(reference, output):
                raise BatteryFailed(f"the {numerics} gate rejects '{name}' on this workload")
            tried[f"{numerics}: {name}"] = "passed"
    return tried


def _with_row(reference: Logits, row: Logits) -> Logits:
    changed = reference.copy()
    changed[len(changed) // 2] = row
    return changed


def _with_value(reference: Logits, value: float) -> Logits:
    changed = reference.copy()
    changed[0, 0] = value
    return changed


def _truncated(reference: Logits) -> Logits:
    changed = reference.copy()
    changed[:, reference.shape[1] // 2 :] = reference.min()
    return changed


def _coarse(reference: Logits, levels: int) -> Logits:
    low, high = reference.min(), reference.max()
    step = (high - low) / levels
    return np.asarray(np.round((reference - low) / step) * step + low, dtype=np.float32)


def _bfloat16(reference: Logits) -> Logits:
    bits = reference.view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    narrowed: Logits = (rounded & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)
    return narrowed
