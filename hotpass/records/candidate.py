"""Candidates: parts with bound parameters + settings + parallelism, immutable, named by a hash of their content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from hotpass.canonical import canonical_json, content_hash

Value = str | int | float | bool | None
"""What a parameter or a setting may hold."""


class Numerics(StrEnum):
    """How far outputs may be from the reference (the model file's own values computed in fp32), narrowest first."""

    BIT_IDENTICAL = "bit-identical"
    TOLERANCE = "tolerance"
    DISTRIBUTION = "distribution"
    LOSSY = "lossy"

    @property
    def rank(self) -> int:
        return list(Numerics).index(self)

    def allows(self, other: Numerics) -> bool:
        """True when a policy of this class admits a candidate of the other."""
        return other.rank <= self.rank


class Reload(StrEnum):
    """What installing a candidate costs an engine, cheapest first."""

    HOT = "hot"
    RECAPTURE = "recapture"
    REWEIGHT = "reweight"
    REKV = "rekv"
    RESHARD = "reshard"
    RESTART = "restart"

    @property
    def rank(self) -> int:
        return list(Reload).index(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSource:
    """The text of a part: `part.py` and what it names (C++ files), as read. Its hash is of these very bytes."""

    name: str
    files: tuple[tuple[str, str], ...]
    """(relative path, text), sorted by path; `part.py` is among them."""

    def __post_init__(self) -> None:
        if "part.py" not in dict(self.files):
            raise ValueError(f"part {self.name!r} has no part.py")
        object.__setattr__(self, "files", tuple(sorted(self.files)))

    @property
    def sha256(self) -> str:
        """Hash of paths and texts; the name is not part of it."""
        return _hash_of_files(self.files)

    def text(self, path: str = "part.py") -> str:
        return dict(self.files)[path]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartUse:
    """A part with every parameter bound."""

    source: PartSource
    params: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What an engine installs. Who proposed it, and why, is the proposal's."""

    parts: tuple[PartUse, ...] = ()
    settings: Mapping[str, Value] = field(default_factory=dict)
    """Only settings that differ from the engine's defaults (`hotpass.settings.DEFAULTS`)."""
    parallelism: Mapping[str, int] = field(default_factory=dict)
    """Only degrees other than 1."""
    numerics: Numerics = Numerics.BIT_IDENTICAL
    """The widest class among its parts and settings."""
    id: str = field(init=False)
    """SHA-256 of the canonical content."""

    def __post_init__(self) -> None:
        content = {
            "parts": sorted(canonical_json([use.source.sha256, use.params]) for use in self.parts),
            "settings": dict(self.settings),
            "parallelism": {name: degree for name, degree in self.parallelism.items() if degree != 1},
            "numerics": self.numerics,
        }
        object.__setattr__(self, "id", content_hash(content))

    @property
    def short_id(self) -> str:
        return self.id[:10]

    @property
    def label(self) -> str:
        """Readable, not an identity: `cpp-decode(bits=4)+threads=2`, or `as loaded`."""
        names = [_with_params(use.source.name, use.params) for use in self.parts]
        names += [f"{key}={value}" for key, value in sorted(self.settings.items())]
        names += [f"{key}{degree}" for key, degree in sorted(self.parallelism.items()) if degree != 1]
        return " + ".join(names) if names else "as loaded"


AS_LOADED = Candidate()
"""The deployment as loaded: no part, no setting. The first incumbent of every campaign."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A candidate with its story."""

    candidate: Candidate
    proposer: str
    """`optuna`, `catalogue`, `person`, `agent:<brief>`, …"""
    parents: tuple[str, ...] = ()
    """Candidate ids it was made from."""
    hypothesis: str = ""
    """Why it should be faster, in one sentence."""


@lru_cache(maxsize=4096)
def _hash_of_files(files: tuple[tuple[str, str], ...]) -> str:
    """Kept: a search asks for the hashes of the same few parts hundreds of times an attempt."""
    return content_hash(files)


def _with_params(name: str, params: Mapping[str, Value]) -> str:
    if not params:
        return name
    return f"{name}({', '.join(f'{key}={value}' for key, value in sorted(params.items()))})"
