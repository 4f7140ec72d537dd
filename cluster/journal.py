"""The loop's hand on the event log: appends, makes durable, folds what it appended into the state, and tells the view.

What the state holds is therefore always what a reader of the log would hold.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.clock import Clock
from cluster.events import Event, EventLog, EventReader
from cluster.ports import View
from cluster.state import CampaignState, fold
from hotpass.decode import json_safe
from hotpass.records.candidate import Proposal
from hotpass.settings import DEFAULTS

FOLDER = "events"
PASSED_OVER = re.compile(
    rb'\{"seq":(\d+),"time":[0-9.e+]+,"schema_version":1,"kind":'
    rb'(?:"lease",|"measurement","payload":\{"assignment":\d+,"candidate_id":"\w+","incumbent_id":"\w+","tier":"\w+",'
    rb'"purpose":"(?:search|remeasure|audit)",)'
)
"""How lines begin of which the state keeps nothing: of a measurement of the search, its attempt says what it came to."""


class Journal:
    """Of one campaign, for its one writer. Every payload gets `elapsed_seconds`, the campaign time."""

    def __init__(
        self, log: EventLog, state: CampaignState, clock: Clock, view: View, files: Callable[[], None] = lambda: None
    ) -> None:
        """`files` makes durable what the events name, before they are: candidates' sources."""
        self.log = log
        self.state = state
        self.clock = clock
        self.view = view
        self._files = files
        self._together = False
        self._wanted = False

    def write(self, kind: str, payload: Mapping[str, Any]) -> int:
        """Append one event; `settle` makes it durable."""
        content = json_safe({**payload, "elapsed_seconds": round(self.clock.seconds(), 3)})
        seq = self.log.append_plain(kind, content)
        self.state.apply(Event(seq=seq, time=0.0, schema_version=1, kind=kind, payload=content))
        self.view.changed(self.state)
        return seq

    def decide(self, decision: str, random_state: int | str = "", **facts: Any) -> None:
        """A decision, with what it was made from: the last event seen, the random state and the clock."""
        self.write(
            "decision",
            {
                "decision": decision,
                "last_seq": self.log.last_seq,
                "random_state": random_state,
                "clock_seconds": round(self.clock.seconds(), 3),
                **facts,
            },
        )

    def propose(self, proposal: Proposal, turn: int | None = None) -> None:
        """`turn`: the one that the search was asked in; None for what was handed in."""
        taken = {} if turn is None else {"turn": turn}
        self.write("proposal", {**proposal_payload(proposal), **taken})

    def settle(self) -> None:
        """Everything written so far is acknowledged: it survives a kill. Within `together`, at the end of that."""
        if self._together:
            self._wanted = True
            return
        self._files()
        self.log.sync()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is settled inside is made durable at once at the end: hundreds of engines share one trip to the disk."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            if self._wanted:
                self._wanted = False
                self.settle()


def proposal_payload(proposal: Proposal) -> dict[str, Any]:
    """What the log keeps of a proposal; the sources are in the campaign's store."""
    candidate = proposal.candidate
    return {
        "candidate_id": candidate.id,
        "label": candidate.label,
        "numerics": candidate.numerics,
        "proposer": proposal.proposer,
        "parents": proposal.parents,
        "hypothesis": proposal.hypothesis,
        "parts": [
            {"name": use.source.name, "sha256": use.source.sha256, "params": use.params} for use in candidate.parts
        ],
        "settings": {name: value for name, value in candidate.settings.items() if value != DEFAULTS.get(name)},
        **({"parallelism": dict(candidate.parallelism)} if candidate.parallelism else {}),
    }


def read_state(folder: Path) -> CampaignState:
    """The state of a campaign folder, running or not; takes no lock. Blocks of the search, most of the log, are not looked into: the
    state keeps nothing of them."""
    reader = EventReader(folder / FOLDER, passes_over=PASSED_OVER)
    with _no_garbage():
        state = fold(itertools.chain.from_iterable(iter(lambda: reader.poll(limit=256), [])))
    state.last_seq = max(state.last_seq, reader.last_seq)
    return state


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """A fold keeps what it makes: looking for garbage in it again and again is a third of the time that it takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
