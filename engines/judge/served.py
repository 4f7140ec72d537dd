"""Tokens that a candidate served in replays, held against the reference: windows of logits do not show what a client gets.

    sample of (request, token) ──► prompt and the tokens before it, by the reference's prefill ──► how far the token is below the best

A greedy continuation may differ from the reference's from the first near tie on, so tokens are not compared with a continuation:
each is judged after the very tokens that the candidate itself made before it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

import numpy as np

from engines.client import token_bytes
from engines.memory import SharedBuffer
from engines.program import ReplayRequest
from engines.stable import Stable, machine_fault
from hotpass.records.measurement import TokenCheck

CHECKED_REQUESTS = 8
"""Requests in a sample."""
CHECKED_TOKENS = 4
"""Tokens of each request: the first, the last, and others between them."""
CHECK_SECONDS = 300.0


def check_served(
    stable: Stable,
    cut: int,
    requests: Sequence[ReplayRequest],
    served: Sequence[Mapping[int, Sequence[int]]],
    rng: random.Random,
) -> TokenCheck:
    """A sample of what several replays of the same requests served (request id → tokens). Raises MachineError."""
    deadline = time.monotonic() + CHECK_SECONDS
    chosen = rng.sample(list(requests), min(CHECKED_REQUESTS, len(requests)))
    regrets: list[float] = []
    squares = 0.0
    with machine_fault("the reference's check of served tokens"):
        for request in chosen:
            made = rng.choice(served)[request.request_id]
            places = sampled_places(len(made), rng)
            logits = _reference_logits(stable, cut, request, made, places, deadline)
            tokens = [made[place] for place in places]
            regrets += (logits.max(axis=1) - logits[np.arange(len(places)), tokens]).tolist()
            squares += float(np.square(logits - logits.mean(axis=1, keepdims=True)).mean(axis=1).sum())
        stable.discard_reference()  # its memory is worth more than the second that another one costs
    return TokenCheck(regrets=tuple(regrets), reference_rms=float(np.sqrt(squares / len(regrets))))


def sampled_places(count: int, rng: random.Random) -> list[int]:
    """Places among `count` tokens, ascending: the first, the last, and others by chance."""
    ends = {0, count - 1}
    between = [place for place in range(count) if place not in ends]
    return sorted(ends | set(rng.sample(between, min(len(between), CHECKED_TOKENS - len(ends)))))


def _reference_logits(
    stable: Stable, cut: int, request: ReplayRequest, made: Sequence[int], places: Sequence[int], deadline: float
) -> np.ndarray:
    """float64 [places, vocab]: what the reference thinks of the token at each place of the output."""
    vocab = stable.recipe.model.vocab_size
    positions = [len(request.tokens) + place - 1 for place in places]
    text = [*request.tokens, *made][: positions[-1] + 1]
    buffer = SharedBuffer(len(places) * vocab)
    try:
        buffer.poison(len(places) * vocab)
        body = {"side": "reference", "cut": cut, "positions": positions, "vocab": vocab}
        child = stable.reference()
        child.call_plain("logits_at", body, deadline=deadline, blob=token_bytes(text), fds=(buffer.fd,))
        return buffer.taken((len(places), vocab)).astype(np.float64)
    finally:
        buffer.close()
