"""The public API: every name resolves, importing loads nothing heavy, and foreign rooms are refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hotpass

HEAVY = ("torch", "ray", "mlflow", "optuna", "pandas", "transformers", "numpy", "rich", "pydantic")


@pytest.mark.parametrize("name", hotpass.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(hotpass, name) is not None


def test_all_is_sorted_and_unknown_names_are_refused() -> None:
    assert sorted(hotpass.__all__) == hotpass.__all__
    assert set(hotpass.__all__) <= set(dir(hotpass))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hotpass.nothing  # noqa: B018


def test_import_loads_nothing_heavy() -> None:
    code = f"import hotpass, cluster.cli, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_foreign_room_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "__init__.py").touch()
    home = str(Path(hotpass.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), home])}
    done = subprocess.run(
        [sys.executable, "-c", "import hotpass"], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: hotpass needs its own top-level package 'search'")
    assert str(tmp_path / "search") in last
