"""Markers are acted on here and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

DATA = Path(os.environ.get("HOTPASS_DATA", Path(__file__).parents[1] / "../shared/data")).resolve()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, saying so."""
    no_data = pytest.mark.skip(reason=f"no measurement data at {DATA} (set HOTPASS_DATA)")
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "data" in item.keywords and not DATA.is_dir():
            item.add_marker(no_data)
        if "gpu" in item.keywords and not _has_gpu():
            item.add_marker(no_gpu)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Folder of real traces and measurements, for tests marked `data`."""
    return DATA


WHOLE = {
    **dict.fromkeys(("engines", "cheats", "known_good"), "engines"),
    **dict.fromkeys(("cluster", "actors", "benchmarks"), "campaigns"),
}
"""Folder of tests → what runs in one process. Two campaigns at a time would wait for each other's measuring lease, and engines of
fixtures that two processes share would be loaded twice."""


class Halves(LoadScopeScheduling):
    """With `-n 2`: engines in one process, campaigns in another; files of the rest go to whoever has ended."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return WHOLE.get(Path(path).parts[1], path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Halves:
    """Marks of xdist's own groups do not survive in this pytest: it computes ids once."""
    return Halves(config, log)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
