"""One spelling for each value, so that identity can be a hash of content.

`canonical_json` sorts keys, forbids NaN, and writes floats as Python's shortest round-trip text.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Json = Any
"""A JSON value: None, bool, int, float, str, list or dict of those."""


def to_plain(value: object) -> Json:
    """Records, enums, tuples and mappings as plain JSON values. Raises TypeError for anything else."""
    if value is None or isinstance(value, (bool, int, float)) or type(value) is str:
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (bytes, bytearray)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [to_plain(item) for item in items]
    raise TypeError(f"{type(value).__name__} has no canonical form")


def canonical_json(value: object) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no NaN (ValueError)."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: object) -> str:
    """SHA-256 of the canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def bytes_hash(data: bytes) -> str:
    """SHA-256 of bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()
