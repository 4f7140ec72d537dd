"""Continuous batching, counted: which steps a closed loop of clients makes. There is no clock here, so no step has a duration.

    clients ──► waiting ──► prefilling ──► decoding ──► done ──► the client's next request
               (max_batch)  (chunk_tokens   (1 token
                             a step, first   a step)
                             come)

A step computes one token for each decoding sequence, then prompt chunks in order of admission, at most `chunk_tokens` prompt
tokens together. The chunk that ends a prompt makes the first output token, so n output tokens take n - 1 decode steps.
Prefixes are not shared: every prompt is computed whole.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotpass.traffic.records import Request

MAX_RUN_STEPS = 64
"""Decode steps that are counted as one entry at most, so that an entry's context is nearly one value."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Kinds of steps, column by column; each entry stands for `steps` consecutive steps of one composition. Arrays have length E."""

    steps: npt.NDArray[np.float64]
    decodes: npt.NDArray[np.float64]
    """Sequences that decode."""
    prefills: npt.NDArray[np.float64]
    """Sequences that compute prompt tokens."""
    query_tokens: npt.NDArray[np.float64]
    """Tokens of one step."""
    context_total: npt.NDArray[np.float64]
    """Tokens in the cache before a step, over its sequences; the mean over the entry's steps."""
    context_max: npt.NDArray[np.float64]
    """The longest of those; the mean over the entry's steps."""
    output_tokens: npt.NDArray[np.float64]
    """Output tokens of one step."""

    @property
    def num_seqs(self) -> npt.NDArray[np.float64]:
        return self.decodes + self.prefills


def count_steps(
    requests: Sequence[Request], *, concurrency: int, chunk_tokens: int, max_batch: int = 0, seed: int = 0
) -> StepCounts:
    """Steps until every request has been answered once; `max_batch` 0 lets every client be in the batch.

    While the last ones are answered, clients go on with requests drawn at random (`seed`), so that the batch does not run
    empty: a deployment has no end.
    """
    batch = min(concurrency, max_batch) if max_batch else concurrency
    source = endless(requests, random.Random(seed))
    loop = _Loop(chunk_tokens=chunk_tokens)
    unanswered = len(requests)
    rows: list[tuple[float, ...]] = []
    while unanswered:
        while loop.num_seqs < batch:
            loop.admit(*next(source))
        rows.append(loop.prompt_step() if loop.prompts else loop.decode_run())
        unanswered -= loop.answered()
    return StepCounts(*np.array(rows, dtype=np.float64).T)


def endless(requests: Sequence[Request], draw: random.Random) -> Iterator[tuple[Request, bool]]:
    """Every request once, in order (True), then any of them (False)."""
    yield from ((request, True) for request in requests)
    while True:
        yield requests[int(draw.random() * len(requests))], False


@dataclass(slots=True)
class _Prompt:
    """A sequence that is being prefilled."""

    remaining: int
    output_tokens: int
    counts: bool
    """False for the requests that only keep the batch full."""
    done: int = 0


class _Loop:
    """The batch. A decoding sequence grows by one token a step, so its context minus the step number, its base, is constant."""

    def __init__(self, *, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.step = 0
        self.prompts: deque[_Prompt] = deque()
        self.ends: list[tuple[int, int, bool]] = []
        """Heap of (first step without the sequence, base, counts), one for each decoding sequence."""
        self.longest: list[int] = []
        """Heap of -base; sequences that ended are taken out when they come to the top."""
        self.stale: Counter[int] = Counter()
        """-base → ended sequences still in `longest`."""
        self.base_total = 0
        self.answered_at_once = 0

    @property
    def num_seqs(self) -> int:
        return len(self.prompts) + len(self.ends)

    def admit(self, request: Request, counts: bool) -> None:
        self.prompts.append(_Prompt(remaining=request.input_tokens, output_tokens=request.output_tokens, counts=counts))

    def decode_run(self) -> tuple[float, ...]:
        """Decode steps until the first sequence ends, as one entry of `StepCounts`."""
        steps = min(self.ends[0][0] - self.step, MAX_RUN_STEPS)
        total, longest = self._contexts()
        decodes, middle = len(self.ends), (steps - 1) / 2
        self.step += steps
        return steps, decodes, 0, decodes, total + decodes * middle, longest + middle, decodes

    def prompt_step(self) -> tuple[float, ...]:
        """One step with prompt tokens in it, as one entry of `StepCounts`."""
        decodes, (total, longest) = len(self.ends), self._contexts()
        budget, prefills, finished = self.chunk_tokens, 0, 0
        for prompt in self.prompts:
            if not budget:
                break
            chunk = min(prompt.remaining, budget)
            total, longest = total + prompt.done, max(longest, prompt.done)
            prompt.done, prompt.remaining = prompt.done + chunk, prompt.remaining - chunk
            budget -= chunk
            prefills += 1
            finished += not prompt.remaining
        self.step += 1
        for _ in range(finished):
            self._start_decoding(self.prompts.popleft())
        return 1, decodes, prefills, decodes + self.chunk_tokens - budget, total, longest, decodes + finished

    def answered(self) -> int:
        """Requests that count and have ended since the last call."""
        count, self.answered_at_once = self.answered_at_once, 0
        while self.ends and self.ends[0][0] <= self.step:
            _, base, counts = heapq.heappop(self.ends)
            self.stale[-base] += 1
            self.base_total -= base
            count += counts
        return count

    def _start_decoding(self, prompt: _Prompt) -> None:
        """The last chunk made the first output token; the others take a step each."""
        if prompt.output_tokens == 1:
            self.answered_at_once += prompt.counts
            return
        base = prompt.done - self.step
        heapq.heappush(self.ends, (self.step + prompt.output_tokens - 1, base, prompt.counts))
        heapq.heappush(self.longest, -base)
        self.base_total += base

    def _contexts(self) -> tuple[int, int]:
        """Total and longest context of the decoding sequences, before this step."""
        while self.longest and self.stale[self.longest[0]]:
            self.stale[heapq.heappop(self.longest)] -= 1
        longest = self.step - self.longest[0] if self.longest else 0
        return self.base_total + len(self.ends) * self.step, longest
