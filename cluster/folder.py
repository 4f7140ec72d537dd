"""Candidates of a campaign folder, by id; and its best one. Reads what `cluster.store` wrote; takes no lock."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.journal import read_state
from hotpass.canonical import to_plain
from hotpass.decode import from_plain
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate


def save_candidate(folder: Path, candidate: Candidate) -> None:
    path = folder / "candidates" / candidate.id
    path.mkdir(parents=True, exist_ok=True)
    (path / "candidate.json").write_text(json.dumps(to_plain(candidate)))


def load_candidates(folder: Path) -> dict[str, Candidate]:
    """Every candidate of the campaign, as loaded included."""
    found = {AS_LOADED.id: AS_LOADED}
    for path in sorted((folder / "candidates").glob("*/candidate.json")):
        candidate = from_plain(Candidate, json.loads(path.read_text()))
        found[candidate.id] = candidate
    return found


def read_candidate_folder(folder: Path) -> Candidate:
    """A candidate from a folder with candidate.toml. Raises InputError."""
    return from_plain(Candidate, json.loads((folder / "candidate.json").read_text()))


def best_candidate(folder: Path) -> Candidate:
    """The winner of a campaign, or its last incumbent when it has none. Raises InputError when nothing was faster."""
    state = read_state(folder)
    wanted = state.winner["candidate_id"] if state.winner else state.incumbent_id
    if wanted == AS_LOADED.id:
        raise InputError(
            "campaign", folder, "found nothing faster than as loaded", "start a new campaign without --continue"
        )
    return load_candidates(folder)[wanted]
