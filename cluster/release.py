"""The release folder of a winner."""

from __future__ import annotations

from pathlib import Path

from cluster.plan import Plan
from cluster.state import CampaignState


def write_release(folder: Path, plan: Plan, state: CampaignState) -> Path:
    return folder / "release"
