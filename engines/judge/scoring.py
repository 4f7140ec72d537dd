"""Agreement with the reference: of a side on held-out text, and of the reference with itself.

Logits stay in shared memory between a child and the judge; what leaves the engine are counts and maxima.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from engines.client import Child, token_bytes
from engines.judge.checks import agreement, check_outputs
from engines.judge.inputs import seed_of
from engines.judge.install import Installer
from engines.judge.windows import check_echo, run_window
from engines.memory import SharedBuffer
from engines.program import Echo
from engines.stable import Stable, machine_fault
from hotpass.records.candidate import Candidate
from hotpass.records.measurement import Agreement, OutputCheck, Side

SCORE_SECONDS = 300.0
"""Deadline of a whole score, installation included."""


def score_texts(
    stable: Stable,
    installer: Installer,
    candidate: Candidate,
    cut: int,
    size: tuple[int, int],
    seed: int,
    noise_abs: float,
) -> Agreement:
    """(texts, tokens each) of held-out text, teacher-forced through a candidate in a fresh child, and through the reference.

    Raises CandidateFailed for the candidate's fault, MachineError for the reference's.
    """
    texts, length = size
    source = stable.recipe.sources(seed_of(seed, "score"), True)
    drawn = [list(source.draw(length)) for _ in range(texts)]
    deadline = time.monotonic() + SCORE_SECONDS
    with machine_fault("a fresh child"):
        child = stable.fresh_child()
    with child:
        installer.install(child, Side.CANDIDATE, candidate, stable.places([cut]), deadline)
        return agreement(_pairs(stable, child, cut, drawn, deadline), noise_abs)


def _pairs(
    stable: Stable, child: Child, cut: int, texts: Sequence[Sequence[int]], deadline: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    vocab = stable.recipe.model.vocab_size
    buffer = SharedBuffer(max(len(text) for text in texts) * vocab)
    reference = SharedBuffer(buffer.num_floats)
    try:
        for text in texts:
            got = _scored(child, Side.CANDIDATE.value, cut, text, vocab, buffer, deadline)
            with machine_fault("the reference's score"):
                want = _scored(stable.reference(), "reference", cut, text, vocab, reference, deadline)
            yield got, want
    finally:
        buffer.close()
        reference.close()


def _scored(
    child: Child, side: str, cut: int, text: Sequence[int], vocab: int, buffer: SharedBuffer, deadline: float
) -> np.ndarray:
    buffer.poison(len(text) * vocab)
    body = {"side": side, "cut": cut, "vocab": vocab}
    echo = child.call_record("score", body, Echo, deadline=deadline, blob=token_bytes(text), fds=(buffer.fd,))
    check_echo(child, side, echo)
    return buffer.taken((len(text), vocab))


def reference_noise(stable: Stable) -> tuple[OutputCheck, ...]:
    """The reference with another number of threads against itself, one set of each row and cut. Raises CandidateFailed."""
    threads = 1 if stable.recipe.threads > 1 else 2
    deadline = time.monotonic() + SCORE_SECONDS
    checks = []
    with stable.fresh_child(threads=threads, trusted=True) as child:
        stable.load_contexts(child, "reference", list(stable.pool), deadline)
        for (cut, row), sets in stable.pool.items():
            known = sets[0]
            assert known.reference is not None, "the pool has references"
            window = run_window(
                child, "reference", cut, row, known.tokens, plan=stable.kv,
                vocab=stable.recipe.model.vocab_size, deadline=deadline,
            )  # fmt: skip
            checks.append(check_outputs(stable.recipe.rows[row], "reference", window.logits, known.reference, 0.0))
    return tuple(checks)
