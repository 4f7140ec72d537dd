"""Traffic: requests from files or presets, what they look like, and the shape table that engines measure."""

from __future__ import annotations

from hotpass.traffic.presets import PRESETS
from hotpass.traffic.read import read_traffic
from hotpass.traffic.records import Dropped, Format, Lengths, Request, Traffic
from hotpass.traffic.shapes import distance, shape_table
from hotpass.traffic.summary import summarize
from hotpass.traffic.text import Realised, TextSource, fill, realised

__all__ = [
    "PRESETS",
    "Dropped",
    "Format",
    "Lengths",
    "Realised",
    "Request",
    "TextSource",
    "Traffic",
    "distance",
    "fill",
    "read_traffic",
    "realised",
    "shape_table",
    "summarize",
]
