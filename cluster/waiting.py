"""A view that says whom an engine waits for: while another campaign, or a local LLM, holds the measuring lease of this machine.

An engine takes the lease by itself, wherever it lives, so the driver does not see it wait. It can see who holds it: as long as that is
not this campaign, its engines wait. On a node of its own an engine has a lease of its own, about which nothing is said here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator

from actors.lease import holder_of
from cluster.ports import View
from cluster.state import CampaignState

POLL_SECONDS = 1.0


class Waits:
    """Passes everything on to `view`; what an engine does gives way to what it waits for. `look` is called by a thread, or a test."""

    def __init__(self, view: View, domain: str, campaign: str, engines: Collection[str]) -> None:
        """`campaign`: folder by which its own engines' leases are told (`EngineSpec.campaign`). `engines`: names of those."""
        self.view, self.domain, self.engines = view, domain, frozenset(engines)
        self._mine = f" of {campaign})"
        self._doing: dict[str, str] = {}
        self._waits_for = ""
        self._lock = threading.Lock()

    def look(self) -> None:
        """Who holds the lease now? Says so, once, and again what each engine does when the wait is over."""
        with self._lock:
            holder = holder_of(self.domain) if self._doing else ""
            waits_for = "" if holder.endswith(self._mine) else holder
            if waits_for == self._waits_for:
                return
            self._waits_for = waits_for
            for engine, text in self._doing.items():
                self._say(engine, text)

    def activity(self, engine: str, text: str) -> None:
        if engine not in self.engines:
            self.view.activity(engine, text)
            return
        with self._lock:
            if text:
                self._doing[engine] = text
            else:
                self._doing.pop(engine, None)
            self._say(engine, text)

    def _say(self, engine: str, text: str) -> None:
        waits = f"waiting for the measuring lease, which {self._waits_for} holds" if self._waits_for and text else ""
        self.view.activity(engine, waits or text)

    def changed(self, state: CampaignState) -> None:
        self.view.changed(state)

    def note(self, text: str) -> None:
        self.view.note(text)

    def close(self) -> None:
        self.view.close()


@contextlib.contextmanager
def telling_waits(view: View, domain: str, campaign: str, engines: Collection[str]) -> Iterator[View]:
    """The view, looking once a second until the block ends."""
    waits, ended = Waits(view, domain, campaign, engines), threading.Event()

    def work() -> None:
        while not ended.wait(POLL_SECONDS):
            waits.look()

    thread = threading.Thread(target=work, name="waits", daemon=True)
    thread.start()
    try:
        yield waits
    finally:
        ended.set()
        thread.join()
