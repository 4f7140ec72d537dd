"""Named systems: published figures of accelerators, each with its source. This machine is probed by `engines.probe`."""

from __future__ import annotations

from hotpass.hardware.figures import FIGURES, SOURCES, Agreement, Figure, System
from hotpass.hardware.systems import SYSTEMS, match_gpu, system

__all__ = ["FIGURES", "SOURCES", "SYSTEMS", "Agreement", "Figure", "System", "match_gpu", "system"]
