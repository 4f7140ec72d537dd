"""Markers are acted on here and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("HOTPASS_DATA", Path(__file__).parents[1] / "../shared/data")).resolve()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, saying so."""
    no_data = pytest.mark.skip(reason=f"no measurement data at {DATA} (set HOTPASS_DATA)")
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_half(item)))
        if "data" in item.keywords and not DATA.is_dir():
            item.add_marker(no_data)
        if "gpu" in item.keywords and not _has_gpu():
            item.add_marker(no_gpu)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Folder of real traces and measurements, for tests marked `data`."""
    return DATA


ENGINES = ("engines", "cheats", "known_good")


def _half(item: pytest.Item) -> str:
    """With `-n 2 --dist loadgroup`: engines in one process, campaigns and the rest in another, which take about as long. No finer: two
    campaigns at a time would wait for each other's measuring lease."""
    return "engines" if item.path.relative_to(Path(__file__).parent).parts[0] in ENGINES else "campaigns"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
