"""The desk of a campaign as a server, where proposers run in other processes: it lives on the driver's node, beside the campaign's folder.

    proposer actor ─ call ─► BoardServer ─► desk ─► folder (reads), inbox (hands in)

It has no state of its own: one that died is made again, and nothing is lost. It calls nobody back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from actors.errors import ray_errors
from hotpass.canonical import Json
from search.agents.exchange import Exchange
from search.agents.spend import LlmCall, LlmSpend
from search.agents.tools import Desk, call_tool

ANSWER_SECONDS = 180.0
"""The longest that a tool takes, a quick check with its compiler among them."""


class ServedDesk(Desk, Protocol):
    """A desk with what agents need beside the tools."""

    def tell(self, call: LlmCall, exchange: Exchange | None = None) -> None: ...

    def waiting(self, author: str) -> int: ...

    def spent(self, author: str) -> LlmSpend: ...


class BoardServer:
    """Safe to call from several threads, as its desk is."""

    def __init__(self, opened: Callable[[], ServedDesk]) -> None:
        """`opened` makes the desk, where the server runs."""
        self._desk = opened()

    def call(self, author: str, tool: str, arguments: Mapping[str, Any]) -> Json:
        """Raises InputError for a bad call."""
        return call_tool(self._desk, author, tool, arguments)

    def tell(self, call: LlmCall, exchange: Exchange | None = None) -> None:
        self._desk.tell(call, exchange)

    def waiting(self, author: str) -> int:
        return self._desk.waiting(author)

    def spent(self, author: str) -> LlmSpend:
        return self._desk.spent(author)


class NearLink:
    """A desk in this process, as agents see it."""

    def __init__(self, desk: ServedDesk) -> None:
        self.tell, self.waiting, self.spent = desk.tell, desk.waiting, desk.spent
        self._desk = desk

    def call(self, author: str, tool: str, arguments: Mapping[str, Any]) -> Json:
        return call_tool(self._desk, author, tool, arguments)


class RemoteLink:
    """A `BoardServer` in an actor, as agents in other actors see it. Travels to them; raises hotpass errors only."""

    def __init__(self, name: str) -> None:
        """`name`: of the actor, in the namespace of the job. A handle among an actor's arguments would bind its restarts to it."""
        self._name = name
        self._actor: Any = None

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return (type(self), (self._name,))

    def call(self, author: str, tool: str, arguments: Mapping[str, Any]) -> Json:
        return self._ask("call", author, tool, dict(arguments))

    def tell(self, call: LlmCall, exchange: Exchange | None = None) -> None:
        self._ask("tell", call, exchange)

    def waiting(self, author: str) -> int:
        return int(self._ask("waiting", author))

    def spent(self, author: str) -> LlmSpend:
        found: LlmSpend = self._ask("spent", author)
        return found

    def _ask(self, method: str, *arguments: object) -> Any:
        import ray

        with ray_errors():
            if self._actor is None:
                self._actor = ray.get_actor(self._name)
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=ANSWER_SECONDS)
