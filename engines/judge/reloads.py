"""A reload is right when warm A→B equals cold B, and A→B→A gives A back; here it is tried, bit for bit.

    child 1: install A ─ answers ─ install B ─ answers, text ─ install A ─ answers
    child 2: install B ─ answers, text

Both children are fresh, so that neither a pair under way nor what lived in its child before has a part in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from engines.client import Child, token_bytes
from engines.judge.install import Installer
from engines.judge.rounds import Place
from engines.judge.windows import run_window
from engines.stable import Stable, machine_fault
from hotpass.records.candidate import Candidate
from hotpass.records.measurement import ReloadProof, Side

PROOF_SECONDS = 300.0
"""Deadline of a whole proof."""
SMALLEST = float(np.finfo(np.float32).tiny)
"""What other bits of equal values (a sign of zero) count as."""
TEXT_TOKENS = 8
"""Generated after each of two prompts."""
AUTOTUNED = "max-autotune-no-cudagraphs"
"""Compile mode that chooses its kernels by timing them, so that two compilations may differ in their bits: not proven this way."""


def can_be_proven(*candidates: Candidate) -> bool:
    """Whether equal bits can be asked of these."""
    return all(candidate.settings.get("compile_mode") != AUTOTUNED for candidate in candidates)


def prove_reload(stable: Stable, installer: Installer, before: Candidate, candidate: Candidate) -> ReloadProof:
    """Try it on every row of every cut. Raises CandidateFailed for a candidate's fault, MachineError for a child's birth."""
    deadline = time.monotonic() + PROOF_SECONDS
    places = stable.places(range(len(stable.recipe.cuts)))
    with _fresh(stable) as child:
        first = _answers(stable, installer, child, before, places, deadline)
        warm = _answers(stable, installer, child, candidate, places, deadline)
        warm_text = _text(stable, child, deadline)
        again = _answers(stable, installer, child, before, places, deadline)
    with _fresh(stable) as child:
        cold = _answers(stable, installer, child, candidate, places, deadline)
        cold_text = _text(stable, child, deadline)
    return ReloadProof(
        before_id=before.id,
        candidate_id=candidate.id,
        epoch=stable.weights.sha256,
        windows=len(places),
        warm_cold_max_abs=_largest(warm, cold),
        back_max_abs=_largest(again, first),
        texts_equal=warm_text == cold_text,
    )


def _fresh(stable: Stable) -> Child:
    with machine_fault("a fresh child"):
        return stable.fresh_child()


def _answers(
    stable: Stable, installer: Installer, child: Child, candidate: Candidate, places: Sequence[Place], deadline: float
) -> list[np.ndarray]:
    """Install on the candidate's side; logits of one known window of each place."""
    installer.install(child, Side.CANDIDATE, candidate, places, deadline)
    vocab = stable.recipe.model.vocab_size
    return [
        run_window(
            child,
            Side.CANDIDATE.value,
            *place,
            stable.pool[place][0].tokens,
            plan=stable.kv,
            vocab=vocab,
            deadline=deadline,
        ).logits
        for place in places
    ]


def _text(stable: Stable, child: Child, deadline: float) -> list[list[int]]:
    """Greedy continuations of the starts of known windows; none where nothing can be served."""
    recipe = stable.recipe
    count = min(2, recipe.serving_slots)
    length = min(16, recipe.serving_context - TEXT_TOKENS)
    if count == 0 or length < 1:
        return []
    tokens = np.concatenate([items[0].tokens.reshape(-1) for items in stable.pool.values()])
    prompts = np.resize(tokens, (count, length))
    body = {"side": Side.CANDIDATE.value, "lengths": [length] * count, "max_tokens": TEXT_TOKENS}
    return child.call_record(
        "generate", body, list[list[int]], deadline=deadline, blob=token_bytes(prompts.reshape(-1))
    )


def _largest(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Largest difference; 0 only for equal bits."""
    worst = 0.0
    for one, other in zip(some, others, strict=True):
        if not np.array_equal(one.view(np.int32), other.view(np.int32)):
            difference = float(np.abs(one.astype(np.float64) - other).max())
            worst = max(worst, difference if math.isfinite(difference) else math.inf, SMALLEST)
    return worst
