"""The report of a campaign: one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path


def write_report(folder: Path) -> Path:
    return folder / "report.html"
