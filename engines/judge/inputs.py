"""Inputs of windows: fresh tokens from a source that a candidate cannot foresee, and a pool of sets whose references are known.

    source ──► contexts of each row (once) ──► pool of input sets a row, references by the reference child (once)
           └─► per attempt: each pool set at most once, in a secret order, then fresh sets

A candidate sees a set before the incumbent does, so that the incumbent's answer to it cannot lie about in freed memory (FAILURES A5).
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from engines.program import KvPlan


class TokenSource(Protocol):
    """Token ids of exact length, each draw from another place of some text."""

    def draw(self, count: int) -> Sequence[int]: ...


@runtime_checkable
class StepSource(TokenSource, Protocol):
    """A source that knows what a step of each row takes: of modules, whose inputs are more than token ids."""

    def steps(self, row: int, count: int) -> np.ndarray:
        """int64 [count, words of a step]."""
        ...


SourceMaker = Callable[[int, bool], TokenSource]
"""(seed, held out) → a source; held-out text never occurs in other draws."""


class RandomTokens:
    """Uniform token ids: for models without a tokenizer, and for tests."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab = vocab

    def draw(self, count: int) -> Sequence[int]:
        drawn: list[int] = self._rng.integers(0, self._vocab, size=count).tolist()
        return drawn


def window_tokens(source: TokenSource, plan: KvPlan, row: int) -> np.ndarray:
    """int64 [steps, query_tokens] of one window of a row; of a `StepSource` as many words a step as it says."""
    if isinstance(source, StepSource):
        return source.steps(row, plan.steps_per_window[row])
    steps, query = plan.steps_per_window[row], plan.rows[row].query_tokens
    return np.array(source.draw(steps * query), dtype=np.int64).reshape(steps, query)


@dataclass(kw_only=True, slots=True, eq=False)
class InputSet:
    """Tokens of one window, and what is known about the right answer."""

    tokens: np.ndarray
    reference: np.ndarray | None = None
    """float32 [steps, num_seqs, vocab] by the reference child; None for fresh sets."""
    loaded: np.ndarray | None = None
    """The same by the deployment as loaded; None for fresh sets."""
    candidate: np.ndarray | None = None
    """What the candidate answered in this attempt; None until it has run."""

    def for_attempt(self) -> InputSet:
        """The same set, not yet answered."""
        return InputSet(tokens=self.tokens, reference=self.reference, loaded=self.loaded)


@dataclass(kw_only=True, slots=True)
class Drawer:
    """Hands out the input sets of one (cut, row) in one attempt."""

    fresh: Callable[[], np.ndarray]
    pool: deque[InputSet]
    answered: deque[InputSet] = field(default_factory=deque)
    """Sets that the candidate has run and the incumbent has not."""

    def for_candidate(self) -> InputSet:
        """A set that no side has run in this attempt."""
        return self.pool.popleft() if self.pool else InputSet(tokens=self.fresh())

    def for_incumbent(self) -> InputSet:
        """The oldest set that the candidate has answered, else a fresh one."""
        return self.answered.popleft() if self.answered else InputSet(tokens=self.fresh())


def drawer(sets: Sequence[InputSet], fresh: Callable[[], np.ndarray], rng: random.Random) -> Drawer:
    """A drawer over a shuffled copy of the pool."""
    order = [item.for_attempt() for item in sets]
    rng.shuffle(order)
    return Drawer(fresh=fresh, pool=deque(order))


def seed_of(*parts: object) -> int:
    """A 63-bit seed from anything printable."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
