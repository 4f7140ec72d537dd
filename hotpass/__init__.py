"""hotpass keeps LLM inference tuned to one deployment. `import hotpass as hp`; every public name is in `__all__`.

    campaign = hp.compile(model="smollm2-135m", traffic="chat", budget="5m")
    campaign.best, campaign.attempts(), campaign.plot(), campaign.report()

Names are resolved on first use, so that `import hotpass` and `hotpass --help` load nothing heavy. This module alone may
name rooms above its own (as strings). It refuses to be used beside another distribution's `engines`, `search`, …: the rooms
are top-level packages, and a mixture of two programs would fail somewhere less clear.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotpass.errors import HotpassError, InputError, MachineError

if TYPE_CHECKING:
    from cluster.api import Campaign, Tried, compile, open_campaign, try_part
    from cluster.planning import plan
    from hotpass.parts import part
    from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, PartSource, PartUse, Proposal, Reload
    from hotpass.records.deployment import Deployment, HardwareRef, ModelRef, Serving, TrafficRef
    from hotpass.records.measurement import Assignment, Attempt, Estimate, MeasureResult, Purpose, Tier, Verdict
    from hotpass.records.shapes import Phase, ShapeRow, ShapeTable
    from hotpass.records.slots import Slot, SlotTable

__version__ = "0.1.0"

ROOMS = ("engines", "costmodel", "search", "verification", "actors", "cluster")
"""The other top-level packages of this distribution."""

_WHERE: dict[str, str] = {
    "compile": "cluster.api",
    "open_campaign": "cluster.api",
    "try_part": "cluster.api",
    "Campaign": "cluster.api",
    "Tried": "cluster.api",
    "plan": "cluster.planning",
    "part": "hotpass.parts",
    **dict.fromkeys(
        ("AS_LOADED", "Candidate", "Numerics", "PartSource", "PartUse", "Proposal", "Reload"),
        "hotpass.records.candidate",
    ),
    **dict.fromkeys(("Deployment", "HardwareRef", "ModelRef", "Serving", "TrafficRef"), "hotpass.records.deployment"),
    **dict.fromkeys(
        ("Assignment", "Attempt", "Estimate", "MeasureResult", "Purpose", "Tier", "Verdict"),
        "hotpass.records.measurement",
    ),
    **dict.fromkeys(("Phase", "ShapeRow", "ShapeTable"), "hotpass.records.shapes"),
    **dict.fromkeys(("Slot", "SlotTable"), "hotpass.records.slots"),
}

__all__ = [
    "AS_LOADED",
    "Assignment",
    "Attempt",
    "Campaign",
    "Candidate",
    "Deployment",
    "Estimate",
    "HardwareRef",
    "HotpassError",
    "InputError",
    "MachineError",
    "MeasureResult",
    "ModelRef",
    "Numerics",
    "PartSource",
    "PartUse",
    "Phase",
    "Proposal",
    "Purpose",
    "Reload",
    "Serving",
    "ShapeRow",
    "ShapeTable",
    "Slot",
    "SlotTable",
    "Tier",
    "TrafficRef",
    "Tried",
    "Verdict",
    "__version__",
    "compile",
    "open_campaign",
    "part",
    "plan",
    "try_part",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hotpass' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def foreign_rooms() -> dict[str, str]:
    """Room → place, for each room that Python would import from another distribution; nothing is imported to find out."""
    home = Path(__file__).resolve().parent.parent
    found: dict[str, str] = {}
    for room in ROOMS:
        spec = importlib.util.find_spec(room)
        if spec is None:
            found[room] = "nowhere"
            continue
        places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
        if home / room not in places:
            found[room] = str(places[0] if places else spec.origin)
    return found


def _refuse_foreign_rooms() -> None:
    for room, place in foreign_rooms().items():
        raise ImportError(
            f"hotpass needs its own top-level package {room!r}, but Python finds it in {place}; "
            "install hotpass into an environment of its own, or remove that folder from the path"
        )


_refuse_foreign_rooms()
