"""What was said to an LLM and what it answered, kept word for word, so that a proposal can be made again from the reply it came from.

    request, reply (keys struck out) ─► Exchange ─► replies/<hash>.json in the campaign's folder ─► `reply` event names the hash

Each names the one before it in its conversation and holds only what was said since, so that a turn is stored once, not once a request.
What is not here: what a call cost (`search.agents.spend`), and what a reply means (`search.agents.replies`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotpass.canonical import content_hash
from hotpass.decode import DecodeError, from_plain, json_safe
from hotpass.errors import MachineError
from search.agents.llm import Reply

FOLDER = "replies"
"""In the campaign folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One request that got a reply."""

    author: str
    """`agent:<brief>`."""
    model: str
    """As litellm names it."""
    before: str
    """Hash of the exchange before it in the same conversation; empty for the first."""
    said: tuple[Mapping[str, Any], ...]
    """Messages since then, as they were sent: role, content, tool calls. Older answers of tools may have been taken back since."""
    reply: Reply
    """With every key struck out."""

    @property
    def sha256(self) -> str:
        return content_hash(json_safe(self))


def keep_exchange(campaign: Path, exchange: Exchange) -> Path:
    """Written whole or not at all, durable when it returns; the same one twice is one file. Raises MachineError."""
    folder = campaign / FOLDER
    target = folder / f"{exchange.sha256}.json"
    if target.exists():
        return target
    temporary = folder / f".{target.name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(json_safe(exchange), file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(target)
    except OSError as error:
        raise MachineError(f"no reply can be kept in {folder}: {error.strerror}") from error
    return target


def read_exchanges(campaign: Path) -> Iterator[Exchange]:
    """Every whole one, by hash; what is no exchange, or was changed since, is passed over."""
    for path in sorted((campaign / FOLDER).glob("[!.]*.json")):
        try:
            exchange = from_plain(Exchange, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, DecodeError):
            continue
        if exchange.sha256 == path.stem:
            yield exchange
