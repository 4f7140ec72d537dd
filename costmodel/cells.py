"""What is left of log times in each cell of rows (a mode of a backend, a backend's format), held to nothing unless rows say otherwise.

A row is in one cell of each kind, and what its cells leave adds up. Ridge regression in which every architecture counts alike, so
that a cell of one architecture moves little; a cell that was never seen corrects nothing. Not here: which cells there are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HELD = 0.3
"""Weight of a cell's zero, in architectures that are wholly in that cell."""
MOST = 1.2
"""Log residual beyond which a row is taken for no further off."""


def fit_cells(cells: pd.DataFrame, residual: Floats, kinds: pd.Series) -> dict[str, float]:
    """`cells` [rows, kinds of cells] names, `residual` [rows] of log time, `kinds` [rows] architectures → cell → what is added to log time."""
    names = sorted({name for column in cells for name in cells[column]})
    x = _members(cells, names)
    weight = (1.0 / kinds.map(kinds.value_counts())).to_numpy(float)
    pulled = (x * weight[:, None]).T
    found = np.linalg.solve(pulled @ x + HELD * np.eye(len(names)), pulled @ np.clip(residual, -MOST, MOST))
    return dict(zip(names, found.tolist(), strict=True))


def log_correction(found: Mapping[str, float], cells: pd.DataFrame) -> Floats:
    """What is added to the log time of each row."""
    return np.asarray(_members(cells, list(found)) @ np.array(list(found.values())), np.float64)


def _members(cells: pd.DataFrame, names: list[str]) -> Floats:
    return np.stack([(cells == name).any(axis=1).to_numpy(float) for name in names], axis=1)
