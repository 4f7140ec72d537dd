"""Continuous batching played event by event: chunked prefill, prefix cache, cache limits, preemption.

    arrivals ──► waiting ──admit (cache has room)──► prefilling in chunks ──► decoding ──► done ──► (closed loop) next request
                    ▲                                                            │
                    └────────────── preempted: cache full, recomputed later ◄────┘

Between two events (an arrival, the end of a chunk, a completion, a full cache) nothing but decode steps happens, and they are taken
at once: no loop runs over tokens. Times come from a plan's step times on a grid; one attention group of one replica is played, since
groups and replicas are alike. Everything it says is *simulated*.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Step times of one plan on grids of at least two points each, interpolated linearly, ends held."""

    batches: Floats
    contexts: Floats
    decode_s: Floats
    """[batches, contexts]."""
    chunks: Floats
    prefill_s: Floats
    """[chunks]: so many new tokens at once, weights streamed once."""

    def decode(self, batch: float, context: float) -> float:
        i, f = _cell(self.batches, batch)
        j, g = _cell(self.contexts, context)
        low = self.decode_s[i, j] * (1 - g) + self.decode_s[i, j + 1] * g
        high = self.decode_s[i + 1, j] * (1 - g) + self.decode_s[i + 1, j + 1] * g
        return float(low * (1 - f) + high * f)

    def prefill(self, tokens: float) -> float:
        return float(np.interp(tokens, self.chunks, self.prefill_s))


def _cell(grid: Floats, value: float) -> tuple[int, float]:
    """Cell of a value, and its place within it."""
    cell = min(max(int(np.searchsorted(grid, value, side="right")) - 1, 0), len(grid) - 2)
    place = (value - float(grid[cell])) / float(grid[cell + 1] - grid[cell])
    return cell, min(max(place, 0.0), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One request."""

    input_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    """Ignored in a closed loop."""
    prefix: tuple[int, ...] = ()
    """Hashes of its leading blocks, as traces give them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What the clients saw, per request in order of completion."""

    ttft_s: Floats
    tpot_s: Floats
    seconds: float
    peak_cache_tokens: int
    preemptions: int
    cached_tokens: int
    """Prompt tokens that the prefix cache answered."""
    refused: int
    """Requests that could never fit into the cache."""

    def goodput(self, ttft_s: float, tpot_s: float) -> float:
        """Requests a second that held both limits."""
        held = (self.ttft_s <= ttft_s) & (self.tpot_s <= tpot_s)
        return float(held.sum() / self.seconds) if self.seconds else 0.0


class _Prefixes:
    """Least recently used blocks of prompts."""

    def __init__(self, block_tokens: int, capacity_tokens: int) -> None:
        self.block, self.room = block_tokens, capacity_tokens // max(block_tokens, 1)
        self.held: OrderedDict[int, None] = OrderedDict()

    def use(self, job: Job) -> int:
        """Leading tokens that were held; the prompt's blocks are held afterwards."""
        hit = 0
        for index, block in enumerate(job.prefix):
            if block in self.held:
                hit += index == hit
                self.held.move_to_end(block)
            else:
                self.held[block] = None
        while len(self.held) > self.room:
            self.held.popitem(last=False)
        return min(hit * self.block, job.input_tokens - 1)


def simulate(
    jobs: Sequence[Job],
    times: StepTimes,
    *,
    cache_tokens: int,
    max_batch: int,
    chunk_tokens: int = 8192,
    clients: int | None = None,
    block_tokens: int = 0,
) -> Simulated:
    """Play `jobs`: by their arrivals, or, with `clients`, in a closed loop that sends the next when one is done. `block_tokens` > 0
    turns the prefix cache on; its blocks live in the same cache as the sequences' own."""
    return _Loop(jobs, times, cache_tokens, max_batch, chunk_tokens, clients, block_tokens).run()


class _Loop:
    """State of one run. Sequences are arrays; what the cache holds is counted as it changes."""

    def __init__(
        self,
        jobs: Sequence[Job],
        times: StepTimes,
        cache_tokens: int,
        max_batch: int,
        chunk_tokens: int,
        clients: int | None,
        block_tokens: int,
    ) -> None:
        self.jobs, self.times, self.cache_tokens = jobs, times, cache_tokens
        self.max_batch, self.chunk, self.clients = max_batch, chunk_tokens, clients
        self.prefixes = _Prefixes(block_tokens, cache_tokens // 2) if block_tokens else None
        self.prompt = np.array([job.input_tokens for job in jobs], np.int64)
        self.wanted = np.array([job.output_tokens for job in jobs], np.int64)
        self.arrival = np.zeros(len(jobs)) if clients else np.array([job.arrival_s for job in jobs])
        self.future = deque(np.argsort(self.arrival, kind="stable").tolist())
        self.waiting: deque[int] = deque()
        self.prefilling: deque[list[int]] = deque()
        self.running = np.zeros(0, np.int64)
        self.now = 0.0
        self.sent, self.first, self.done = np.zeros(len(jobs)), np.full(len(jobs), np.nan), np.full(len(jobs), np.nan)
        self.produced = np.zeros(len(jobs), np.int64)
        self.held = self.decoding = 0
        """Tokens that the cache holds in all, and those of running sequences."""
        self.peak = self.preemptions = self.cached = self.refused = 0

    def run(self) -> Simulated:
        for _ in range(min(self.clients or 0, len(self.jobs))):
            self._send()
        while self.waiting or len(self.running) or self.prefilling or self.future:
            self._arrive()
            self._admit()
            if self.prefilling:
                self._mixed_step()
            elif len(self.running):
                self._decode_until_event()
            elif self.future:
                self.now = max(self.now, float(self.arrival[self.future[0]]))
        ended = np.flatnonzero(~np.isnan(self.done))
        ended = ended[np.argsort(self.done[ended], kind="stable")]
        span = self.done[ended] - self.first[ended]
        return Simulated(
            ttft_s=self.first[ended] - self.sent[ended],
            tpot_s=span / np.maximum(self.wanted[ended] - 1.0, 1.0),
            seconds=self.now,
            peak_cache_tokens=self.peak,
            preemptions=self.preemptions,
            cached_tokens=self.cached,
            refused=self.refused,
        )

    def _send(self) -> None:
        if self.future:
            job = self.future.popleft()
            self.sent[job] = self.now
            self.waiting.append(job)

    def _arrive(self) -> None:
        while not self.clients and self.future and self.arrival[self.future[0]] <= self.now:
            job = self.future.popleft()
            self.sent[job] = self.arrival[job]
            self.waiting.append(job)

    def _admit(self) -> None:
        while self.waiting and len(self.running) + len(self.prefilling) < self.max_batch:
            job = self.waiting[0]
            if self.prompt[job] + self.wanted[job] > self.cache_tokens:
                self.waiting.popleft()
                self.refused += 1
                self._next_client()
                continue
            need = int(self.prompt[job] + self.produced[job])
            if self.held + need + 1 > self.cache_tokens:
                return
            self.waiting.popleft()
            hit = self.prefixes.use(self.jobs[job]) if self.prefixes else 0
            self.cached += hit
            self.held += need
            self.prefilling.append([job, need - hit])

    def _mixed_step(self) -> None:
        """One step: every running sequence decodes a token, and a chunk of prompts is prefilled beside it."""
        room, ready = self.chunk, []
        while self.prefilling and room > 0:
            entry = self.prefilling[0]
            part = min(room, entry[1])
            entry[1] -= part
            room -= part
            if entry[1] > 0:
                break
            ready.append(self.prefilling.popleft()[0])
        seconds = self.times.prefill(self.chunk - room)
        if len(self.running):
            seconds += self.times.decode(len(self.running), self.decoding / len(self.running))
        self._advance(1, seconds)
        if ready:
            joined = np.array(ready)
            self.produced[joined] += 1
            self.held += len(ready)
            self.decoding += int((self.prompt[joined] + self.produced[joined]).sum())
            self.first[joined] = np.where(np.isnan(self.first[joined]), self.now, self.first[joined])
            self.running = np.concatenate([self.running, joined])
        self._finish()

    def _decode_until_event(self) -> None:
        batch = len(self.running)
        free = self.cache_tokens - self.held
        if free < batch:
            self._preempt()
            return
        steps = max(1, min(int((self.wanted[self.running] - self.produced[self.running]).min()), free // batch))
        one = self.times.decode(batch, self.decoding / batch + steps / 2)
        if not self.clients and self.future:
            steps = max(1, min(steps, int(np.ceil((self.arrival[self.future[0]] - self.now) / one))))
        self._advance(steps, steps * one)
        self._finish()

    def _advance(self, steps: int, seconds: float) -> None:
        self.now += seconds
        self.produced[self.running] += steps
        self.held += steps * len(self.running)
        self.decoding += steps * len(self.running)
        self.peak = max(self.peak, self.held)

    def _finish(self) -> None:
        over = self.produced[self.running] >= self.wanted[self.running]
        if over.any():
            ended = self.running[over]
            self.running = self.running[~over]
            self.done[ended] = self.now
            freed = int((self.prompt[ended] + self.produced[ended]).sum())
            self.held -= freed
            self.decoding -= freed
            for _ in range(len(ended)):
                self._next_client()

    def _next_client(self) -> None:
        if self.clients:
            self._send()

    def _preempt(self) -> None:
        """The youngest gives its cache back and is recomputed, with what it already produced, when there is room."""
        job = int(self.running[-1])
        self.running = self.running[:-1]
        freed = int(self.prompt[job] + self.produced[job])
        self.held -= freed
        self.decoding -= freed
        self.waiting.appendleft(job)
        self.preemptions += 1
