"""What the extras bring along: no release that stole credentials, and nothing that runs by itself when Python starts."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

import pytest

STOLEN = {"1.82.7", "1.82.8", "1.107.0"}
"""Of litellm: the first two sent the environment's credentials away, by a .pth file that runs at every start of Python."""
EXTRAS = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_requirement_excludes_the_bad_releases() -> None:
    (requirement,) = EXTRAS["agents"]
    assert set(re.findall(r"!=([0-9.]+)", requirement)) == STOLEN


@pytest.mark.parametrize("name", ["litellm", "mcp", "openai"])
def test_no_distribution_of_the_extras_runs_at_start(name: str) -> None:
    try:
        found = files(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert version(name) not in STOLEN or name != "litellm"
    assert [str(path) for path in found or () if path.suffix == ".pth"] == []
