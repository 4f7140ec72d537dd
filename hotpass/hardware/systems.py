"""Looking named systems up: by name or alias, or by what NVML calls a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hotpass.errors import InputError, nearest
from hotpass.hardware.figures import System
from hotpass.hardware.table import ALL

SYSTEMS: Mapping[str, System] = {known.name: known for known in ALL}
"""Name → system."""


def system(name: str) -> System:
    """The system of that name or alias, letter case aside. Raises InputError with the nearest name."""
    asked = re.sub(r"[\s_]+", "-", name.strip().lower())
    for known in SYSTEMS.values():
        if asked == known.name or asked in known.aliases:
            return known
    spellings = [spelling for known in SYSTEMS.values() for spelling in (known.name, *known.aliases)]
    raise InputError("hardware", name, "is not a known system", nearest(asked, spellings))


def match_gpu(nvml_name: str, memory_bytes: int) -> str | None:
    """Name of the system whose GPU this is, by NVML's name; None when the table has none with such a memory."""
    for known in SYSTEMS.values():
        if any(re.search(pattern, nvml_name, re.IGNORECASE) for pattern in known.gpu_names):
            published = known.numbers["memory_gb"].value * 1e9
            if 0.85 <= memory_bytes / published <= 1.15:
                return known.name
    return None
