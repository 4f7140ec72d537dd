"""The report of a campaign, running or done: one self-contained HTML file made from its folder."""

from __future__ import annotations

import os
from pathlib import Path

FILE = "report.html"


def write_report(folder: Path) -> Path:
    """Write `report.html` into the campaign folder, atomically; returns its path. Raises InputError when it is no campaign."""
    from cluster.report.data import gather
    from cluster.report.page import render

    text = render(gather(folder))
    temporary = folder / f".{FILE}.{os.getpid()}"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / FILE)
    return folder / FILE
