"""Plans as arrays: how many ranks share each part of the model, one entry for each plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One replica's parallelism, arrays [plans]. Attention runs on `dp` groups of `tp` ranks, experts on `moe_tp` x `ep` = `tp` x `dp`."""

    tp: Ints
    dp: Ints
    """Attention data parallelism: each group has its own sequences."""
    pp: Ints
    moe_tp: Ints
    ep: Ints
    dcp: Ints
    """Decode context parallelism: ranks of a tensor-parallel group that share one cache's tokens instead of copying them."""
    all_to_all: NDArray[np.bool_]
    """Tokens go to their experts by all-to-all; False: by all-gather and reduce-scatter. Only where dp and ep exceed 1."""

    @property
    def gpus(self) -> Ints:
        return self.tp * self.dp * self.pp

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> Layout:
        return Layout(**{name: getattr(self, name)[chosen] for name in NAMES})

    @staticmethod
    def of(
        *, tp: int = 1, dp: int = 1, pp: int = 1, moe_tp: int | None = None, ep: int = 1, dcp: int = 1, all_to_all: bool = False
    ) -> Layout:  # fmt: skip
        """A single plan."""
        one = {
            "tp": tp,
            "dp": dp,
            "pp": pp,
            "moe_tp": tp * dp // ep if moe_tp is None else moe_tp,
            "ep": ep,
            "dcp": dcp,
        }
        return Layout(**{name: np.array([value]) for name, value in one.items()}, all_to_all=np.array([all_to_all]))

    @staticmethod
    def one(values: Mapping[str, int]) -> Layout:
        """A single plan from its numbers by name."""
        return Layout(
            **{name: np.array([values[name]]) for name in NAMES[:-1]}, all_to_all=np.array([bool(values[NAMES[-1]])])
        )

    def label(self, index: int) -> str:
        """As `tp8`, `tp1 dp8 ep8 a2a`, `tp4 pp2`."""
        parts = [f"tp{self.tp[index]}"]
        parts += [
            f"{name}{getattr(self, name)[index]}"
            for name in ("dp", "pp", "ep", "dcp")
            if getattr(self, name)[index] > 1
        ]
        parts += ["a2a"] if self.all_to_all[index] else []
        return " ".join(parts)


NAMES = ("tp", "dp", "pp", "moe_tp", "ep", "dcp", "all_to_all")
