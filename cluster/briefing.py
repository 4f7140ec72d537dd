"""What a campaign's driver leaves in the folder for its proposers, who may run in other processes: the slot table of its engine,
whether there is a compiler where the engine is, for agents a profile of the deployment as loaded, and, once somebody asked, the
sources of the slots.

Derived from the engine and the model; deleting it loses nothing that the next session does not write again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from hotpass.decode import DecodeError, from_plain, json_safe
from hotpass.errors import InputError
from hotpass.records.profile import Profile
from hotpass.records.slots import SlotTable

FILE = "briefing.json"
SOURCES_FILE = "slot-sources.json"
PROFILE_FILE = "profile.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Briefing:
    """What a proposer must know of the engine."""

    slots: SlotTable
    compiler: bool
    """Whether C++ can be built where the engine is."""


def write_briefing(campaign: Path, slots: SlotTable, compiler: bool) -> None:
    """Whole or not at all."""
    _write(campaign / FILE, json_safe(Briefing(slots=slots, compiler=compiler)))


def read_briefing(campaign: Path) -> Briefing:
    """Raises InputError while no session has loaded an engine."""
    try:
        return from_plain(Briefing, json.loads((campaign / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(
            "campaign", campaign, "has no slot table yet", "wait until its engine is loaded, or resume it"
        ) from None
    except (ValueError, DecodeError) as error:
        raise InputError("campaign", campaign / FILE, f"cannot be read: {error}", "resume the campaign") from None


def write_profile(campaign: Path, profile: Profile) -> None:
    _write(campaign / PROFILE_FILE, json_safe(profile))


def read_profile(campaign: Path) -> Profile | None:
    """Of the deployment as loaded; None where none was taken."""
    try:
        return from_plain(Profile, json.loads((campaign / PROFILE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def write_sources(campaign: Path, texts: dict[str, dict[str, str]]) -> None:
    _write(campaign / SOURCES_FILE, texts)


def read_sources(campaign: Path) -> dict[str, dict[str, str]]:
    """Claim → {"reference", "template"}; empty when nobody asked yet."""
    try:
        found: dict[str, dict[str, str]] = json.loads((campaign / SOURCES_FILE).read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return {}


def _write(path: Path, content: object) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    temporary.replace(path)
