"""A proposer as a server: one agent that thinks, turn after turn, until it is stopped or has spent its share. A plain class, wrapped
last as a Ray actor (`cluster.agents`), or run by a thread where there is no Ray.

    start ─► [turn ─► pause?] … ─► stopped | spent          keys: into this process's environment, and nowhere else

It never waits for an engine beyond its own limit of unmeasured proposals, and nothing waits for it. A turn that went wrong makes
the next one wait longer, so that a dead LLM costs the machine nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol
from urllib.parse import urlsplit

from actors.lease import MeasuringLease
from hotpass.errors import HotpassError, InputError, MachineError
from search.agents.agent import Agent, Link, Turn
from search.agents.briefs import brief_of
from search.agents.llm import Llm, LlmSpec
from search.agents.secret import Secret, give_keys, hidden
from search.agents.spend import LlmCaps, LlmSpend

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 120.0
"""After a turn that went wrong; doubled each time."""
ENDING = ("no-access", "not-found", "too-long")
"""Outcomes that no later turn would change: the agent ends at the first."""
HOPELESS_AFTER = 3
"""Bad turns in a row after which nobody waits for an agent when nothing else is left to measure."""
AHEAD = 2
"""Own proposals that may be unmeasured while an agent thinks of the next: it should learn from them."""
LOOK_SECONDS = 1.0
"""Between two looks at whether they were measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposerSpec:
    """Everything that one agent takes, but its keys."""

    index: int
    """Which brief it has."""
    llm: LlmSpec
    caps: LlmCaps
    """Its own share of the campaign's."""
    turn_seconds: float = 300.0
    """One deadline for each proposal, over all requests and retries."""
    lease_domain: str = ""
    """Memory-bandwidth domain that a local LLM shares with the engines; empty when the LLM runs elsewhere."""
    niceness: int = 0
    """Added to that of its process, where it has one of its own: whatever measures on the same cores comes first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What an agent does now."""

    turns: int = 0
    last: Turn = field(default_factory=lambda: Turn(outcome="not begun"))
    bad_in_a_row: int = 0
    """Turns that went wrong since the last good one."""
    ended: str = ""
    """Why it proposes nothing any more; empty while it does."""

    @property
    def is_hopeful(self) -> bool:
        """Whether it is worth waiting for when nothing else is left to measure."""
        return not self.ended and self.bad_in_a_row < HOPELESS_AFTER


class CampaignLink(Link, Protocol):
    """What a proposer has of its campaign beyond its tools."""

    def waiting(self, author: str) -> int:
        """Its proposals that have no attempt yet; negative once the search has ended."""
        ...

    def spent(self, author: str) -> LlmSpend:
        """What its calls have cost so far, over all sessions."""
        ...


class ProposerServer:
    """One agent. `run` returns when it is stopped, when its share is spent, or when the search has ended."""

    def __init__(self, spec: ProposerSpec, link: CampaignLink, keys: Mapping[str, Secret] | None = None) -> None:
        self.spec = spec
        self.link = link
        self.author = f"agent:{brief_of(spec.index).name}"
        self._keys = dict(keys or {})
        self._stop = threading.Event()
        self._standing = Standing()

    def run(self) -> Standing:
        """Never raises: what went wrong is the standing's."""
        give_keys(self._keys, os.environ)
        os.nice(self.spec.niceness)
        try:
            reason = self._propose()
        except HotpassError as error:
            reason = str(error)
        except Exception as error:  # a fault of ours or of a library must not look like a working agent
            reason = f"{type(error).__name__}: {error}"
        reason = hidden(reason, self._keys.values())
        self._standing = replace(self._standing, ended=reason)
        return self._standing

    def standing(self) -> Standing:
        return self._standing

    def stop(self) -> None:
        """The turn under way ends where it stands; what it cost is told."""
        self._stop.set()

    def _propose(self) -> str:
        """Why it ended."""
        spec = self.spec
        llm = Llm(spec.llm, self.author, keys=self._keys, stop=self._stop)
        try:
            if spec.caps.usd and not spec.caps.tokens and not llm.is_priced:
                raise InputError(
                    "--llm-max-usd", spec.caps.usd, f"cannot be kept: the price of {spec.llm.model} is unknown",
                    "give --llm-max-tokens too",
                )  # fmt: skip
            agent = Agent(
                brief_of(spec.index), llm, self.link, caps=spec.caps, spent=self.link.spent(self.author), turn_seconds=spec.turn_seconds,
                between=_beside(spec.lease_domain, spec.turn_seconds),
            )  # fmt: skip
            pause = PAUSE_SECONDS
            while not self._stop.is_set():
                waiting = self.link.waiting(self.author)
                if waiting < 0:
                    return "the search has ended"
                if waiting >= AHEAD:
                    self._stop.wait(LOOK_SECONDS)
                    continue
                turn = agent.turn()
                bad = 0 if turn.is_good else self._standing.bad_in_a_row + 1
                self._standing = Standing(turns=self._standing.turns + 1, last=turn, bad_in_a_row=bad)
                if turn.outcome == "spent":
                    return turn.detail
                if turn.outcome in ENDING:
                    return f"{turn.outcome}: {turn.detail}"
                pause = PAUSE_SECONDS if turn.is_good else min(2 * pause, LONGEST_PAUSE_SECONDS)
                self._stop.wait(0.0 if turn.outcome == "proposed" else pause)
            return "stopped"
        finally:
            llm.close()


def is_on_this_machine(api_base: str) -> bool:
    """Whether a server's address is one of this machine's own: its LLM then shares memory bandwidth with the engines."""
    host = urlsplit(api_base).hostname or ""
    if host in ("localhost", "0.0.0.0", "::"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _beside(domain: str, patience_seconds: float) -> Callable[[], AbstractContextManager[object]]:
    """What is held during a request: the measuring lease where the LLM would disturb measurements, else nothing.

    Without a gap between measurements in all that time the request is made all the same: a lease is a courtesy, a deadline is not.
    """

    if not domain:
        return contextlib.nullcontext

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(MachineError):
                stack.enter_context(MeasuringLease(domain, patience_seconds=patience_seconds))
            yield

    return held
