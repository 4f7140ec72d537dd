"""How the two sides of a pair live: both in one child, in turn in one child, or each in a child of its own.

A `Pair` runs a window of either side; rounds and replays do not know which kind it is. Which kind an attempt asks for follows from its
candidates and its purpose (`hotpass.pairing`); that memory does not hold both sides is known here only, once they are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engines.client import Child
from engines.judge.windows import Window, run_window
from engines.program import KvPlan
from hotpass.records.measurement import Pairing, Side

if TYPE_CHECKING:
    from engines.judge.install import PartFiles


class Pair(Protocol):
    """Two sides, ready to be measured in any order."""

    keeps_both: bool
    """Whether what a side's last window left is still there after the other's."""

    def window(self, side: Side, cut: int, row: int, tokens: np.ndarray, deadline: float) -> Window: ...

    def place(self, side: Side) -> tuple[Child, str]:
        """The child in which a side is installed now, and its name there."""
        ...


class SideBySide:
    """Both sides in one child."""

    keeps_both = True

    def __init__(self, child: Child, plan: KvPlan, vocab: int) -> None:
        self._child, self._plan, self._vocab = child, plan, vocab

    def place(self, side: Side) -> tuple[Child, str]:
        return self._child, side.value

    def window(self, side: Side, cut: int, row: int, tokens: np.ndarray, deadline: float) -> Window:
        child, name = self.place(side)
        return run_window(child, name, cut, row, tokens, plan=self._plan, vocab=self._vocab, deadline=deadline)


class OwnProcesses:
    """Each side in a child of its own (`two-engines`); the other child sleeps in its socket meanwhile."""

    keeps_both = True

    def __init__(self, incumbent: Child, candidate: Child, plan: KvPlan, vocab: int) -> None:
        self._children = {Side.INCUMBENT: incumbent, Side.CANDIDATE: candidate}
        self._plan, self._vocab = plan, vocab

    def place(self, side: Side) -> tuple[Child, str]:
        return self._children[side], side.value

    def window(self, side: Side, cut: int, row: int, tokens: np.ndarray, deadline: float) -> Window:
        child, name = self.place(side)
        return run_window(child, name, cut, row, tokens, plan=self._plan, vocab=self._vocab, deadline=deadline)


class Alternating:
    """One child that holds one of the two at a time; the exchange lies outside every window."""

    keeps_both = False

    def __init__(self, child: Child, plan: KvPlan, vocab: int, exchange: Callable[[Side], None]) -> None:
        """`exchange(side)` puts that side's candidate, and nothing else, into the child's `candidate` place."""
        self._child, self._plan, self._vocab = child, plan, vocab
        self._exchange = exchange
        self._installed: Side | None = None

    def place(self, side: Side) -> tuple[Child, str]:
        if side is not self._installed:
            self._installed = None
            self._exchange(side)
            self._installed = side
        return self._child, Side.CANDIDATE.value

    def window(self, side: Side, cut: int, row: int, tokens: np.ndarray, deadline: float) -> Window:
        child, name = self.place(side)
        return run_window(child, name, cut, row, tokens, plan=self._plan, vocab=self._vocab, deadline=deadline)


def derived_sizes(files: Sequence[PartFiles], cuts: Iterable[int]) -> dict[Path, int]:
    """Files of derived weights on some cuts → bytes: what a side holds in memory beyond the weights as loaded."""
    chosen = list(cuts)
    paths = {path for item in files if item.derived for cut in chosen for path in item.derived[cut].values()}
    return {path: path.stat().st_size for path in paths}


def pairing_within(
    ordered: Pairing, incumbent: Mapping[Path, int], candidate: Mapping[Path, int], room_bytes: int
) -> Pairing:
    """As ordered, but alternating where the derived weights of both sides do not fit at once. A file of both is held once."""
    together = sum({**incumbent, **candidate}.values())
    return ordered if together <= room_bytes else Pairing.ALTERNATING
