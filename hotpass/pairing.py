"""How the two sides of a pair are to live, by why they are measured and by what the candidate's reload does to a process.

    cold, and every promoted candidate ─► two-engines: a claim, and what leads to one, is measured in processes of the sides' own
    recapture, reshard, restart        ─► two-engines: compiling and settings of the process leave traces for whoever shares it
    everything else                    ─► side-by-side

Whether memory holds both sides is known to the engine alone, once they are built: it makes `alternating` of either
(`engines.judge.pairing`). `MeasureResult.pairing` says what ran.
"""

from __future__ import annotations

import contextlib

from hotpass.errors import InputError
from hotpass.parts import declaration
from hotpass.records.candidate import AS_LOADED, Candidate, Reload
from hotpass.records.measurement import Pairing, Purpose, Tier
from hotpass.settings import BY_NAME, DEFAULTS

OF_A_PROCESS = frozenset({Reload.RECAPTURE, Reload.RESHARD, Reload.RESTART})
"""Reload classes that change the process which they happen in."""


def choose_pairing(incumbent: Candidate, candidate: Candidate, tier: Tier, purpose: Purpose) -> Pairing:
    """What to order. As loaded beside itself stays in one process, since that is the noise which pairs there are held against.

    The incumbent's class does not count: what it left in the process was there, and was proven harmless, before the candidate came."""
    if purpose is Purpose.COLD:
        return Pairing.TWO_ENGINES
    if purpose is Purpose.AA or candidate == AS_LOADED == incumbent:
        return Pairing.SIDE_BY_SIDE
    if tier is Tier.SLOW or OF_A_PROCESS & reload_classes(candidate):
        return Pairing.TWO_ENGINES
    return Pairing.SIDE_BY_SIDE


def reload_classes(candidate: Candidate) -> frozenset[Reload]:
    """Of its parts and settings, as declared; of degrees of parallelism other than 1. A part that cannot be read has none: whoever
    installs it says what is wrong with it."""
    parts: set[Reload] = set()
    for use in candidate.parts:
        with contextlib.suppress(InputError):
            parts.add(declaration(use.source).reload)
    changed = {name: value for name, value in candidate.settings.items() if value != DEFAULTS.get(name)}
    settings = {BY_NAME[name].reload if name in BY_NAME else Reload.RESTART for name in changed}
    sharded = {Reload.RESHARD} if any(degree != 1 for degree in candidate.parallelism.values()) else set()
    return frozenset(parts | settings | sharded)
