"""A campaign for agents' tests: it answers from a can, and remembers what it was asked and told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotpass.canonical import Json
from hotpass.errors import InputError, MachineError
from search.agents.exchange import Exchange
from search.agents.spend import LlmCall, LlmSpend


class CannedCampaign:
    """A link that answers every tool, refuses slots that it does not know, and remembers what it was asked and told."""

    def __init__(self, submission: Mapping[str, Json] | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.told: list[LlmCall] = []
        self.exchanges: list[Exchange] = []
        self.submission = submission or {"standing": "queued", "what": "a", "candidate": "c" * 64}
        self.is_dead = False
        self.num_waiting = 0

    def call(self, author: str, tool: str, arguments: Mapping[str, Any]) -> Json:
        if self.is_dead:
            raise MachineError("the board does not answer")
        self.asked.append((tool, dict(arguments)))
        if tool == "slot_source":
            raise InputError(
                "slot", arguments["slot"], "is not in the slot table", "did you mean 'model.layers.*.mlp'?"
            )
        if tool == "submit_proposal":
            return dict(self.submission)
        if tool == "catalogue" and "part" in arguments:
            return {"text": "x = 1\n" * 600}
        return {"rows": [], "candidates": [], "posts": [], "slots": [], "parts": [], "as_loaded": []}

    def tell(self, call: LlmCall, exchange: Exchange | None = None) -> None:
        self.told.append(call)
        self.exchanges += [exchange] if exchange else []

    def waiting(self, author: str) -> int:
        return self.num_waiting

    def spent(self, author: str) -> LlmSpend:
        return LlmSpend()
