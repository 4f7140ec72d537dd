"""A campaign's log, followed by a process that does not write it: the folded state, and step times by row of who matters.

Each `refresh` reads what is new. Safe to share between threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from cluster.events import EventReader
from cluster.folder import all_candidates
from cluster.journal import FOLDER
from cluster.plan import Plan
from cluster.report.data import RowTimes, row_times
from cluster.state import CampaignState
from cluster.store import load_candidate
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.measurement import Attempt


class Follower:
    """Implements `search.inbox.Ledger` over a campaign folder."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.plan = plan
        self.state = CampaignState()
        self.times: dict[str, list[RowTimes]] = {}
        """Candidate id → step times of its latest timed measurement on the fast tier."""
        self._reader = EventReader(folder / FOLDER)
        self._candidates: dict[str, Candidate] | None = None
        self._lock = threading.Lock()

    def refresh(self) -> CampaignState:
        with self._lock:
            for event in self._reader.poll():
                self.state.apply(event)
                if event.kind == "measurement" and "candidate_id" in event.payload:
                    blocks = event.payload["result"].get("blocks") or ()
                    if blocks:
                        floors = self.state.start.get("floors_ms", {})
                        self.times[event.payload["candidate_id"]] = row_times(blocks, self.plan, floors)
            return self.state

    def is_proposed(self, candidate_id: str) -> bool:
        return candidate_id == AS_LOADED.id or candidate_id in self.refresh().candidates

    def attempts_of(self, candidate_id: str) -> Sequence[Attempt]:
        return [row.attempt for row in self.refresh().attempts_of(candidate_id)]

    def candidates(self) -> dict[str, Candidate]:
        """Every candidate whose sources are in the store, each read and verified once."""
        with self._lock:
            if self._candidates is None:
                self._candidates = all_candidates(self.folder)
            for path in (self.folder / "candidates").glob("[!.]*/candidate.toml"):
                if path.parent.name not in self._candidates:
                    self._candidates[path.parent.name] = load_candidate(self.folder, path.parent.name)
            return dict(self._candidates)

    def find(self, named: str) -> Candidate:
        """By id, its beginning, `incumbent` or `loaded`. Raises InputError."""
        state = self.refresh()
        wanted = {"incumbent": state.incumbent_id, "loaded": AS_LOADED.id}.get(named, named)
        found = [c for candidate_id, c in self.candidates().items() if wanted and candidate_id.startswith(wanted)]
        if len(found) != 1:
            problem = (
                "is no candidate of this campaign" if not found else f"is the beginning of {len(found)} candidates"
            )
            raise InputError("candidate", named, problem, "give an id that the tool `candidates` shows")
        return found[0]
