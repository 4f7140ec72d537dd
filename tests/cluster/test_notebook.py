"""The example notebook runs from a clean kernel, and its cells show what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / "campaign.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(ROOT / "examples")}}
    ).execute()
    shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert "text/html" in data_of(shown[1])
    assert "'cold'" in data_of(shown[2])["text/plain"]
    assert "kind='simulated'" in data_of(shown[2])["text/plain"]
    assert "image/png" in data_of(shown[4])
    assert "report.html" in data_of(shown[6])["text/plain"]


def data_of(outputs: Any) -> dict[str, str]:
    """What a cell's last output displays."""
    return dict(outputs[-1]["data"])
