"""A campaign folder read as a whole: its candidates with the deployment as loaded among them, and the one that won."""

from __future__ import annotations

from pathlib import Path

from cluster.journal import read_state
from cluster.store import load_candidate, load_candidates
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate


def all_candidates(folder: Path) -> dict[str, Candidate]:
    """Every candidate of the campaign by id, as loaded included. Raises InputError for one that was tampered with."""
    return {AS_LOADED.id: AS_LOADED, **load_candidates(folder)}


def best_candidate(folder: Path) -> Candidate:
    """The winner of a campaign, or its last incumbent when it has none. Raises InputError when nothing was faster."""
    state = read_state(folder)
    wanted = state.winner["candidate_id"] if state.winner else state.incumbent_id
    if wanted == AS_LOADED.id:
        raise InputError(
            "campaign", folder, "found nothing faster than as loaded", "start a new campaign without --continue"
        )
    return load_candidate(folder, wanted)
