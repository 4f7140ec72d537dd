"""One kill of each kind that no other test makes, on real processes, by the bench that makes five of all nine (`make bench-search`).

Elsewhere: an engine (`tests/actors/test_on_ray.py`), a child (`tests/engines/test_faults.py`), a proposer and the board
(`test_agents.py`), the driver (`test_campaign.py`, `test_real_engine.py`), the recorder's mirror (`test_ledger.py`), a full disk
(`test_hindsight.py`).
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import kill_matrix


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("victim", ["builder", "mlflow"])
def test_a_kill_loses_nothing_doubles_nothing_and_leaves_nothing_running(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill_matrix, "ATTEMPTS", 24)
    monkeypatch.chdir(tmp_path)
    found = kill_matrix.one_kill(tmp_path / "c", victim, random.Random(0))
    assert found == {"lost": 0, "doubled": 0, "running": 0, "met": 1}
