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
        if "data" in item.keywords and not DATA.is_dir():
            item.add_marker(no_data)
        if "gpu" in item.keywords and not _has_gpu():
            item.add_marker(no_gpu)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Folder of real traces and measurements, for tests marked `data`."""
    return DATA


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
