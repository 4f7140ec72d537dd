"""The serving loop: continuous batching over KV slots, greedy, for replay, generation and scoring.

    waiting ──admit (a free slot)──► prefilling ──chunks of `chunk_tokens`──► decoding ──last token──► slot freed ──► next client

One step takes a token of every decoding sequence and fills up with prompt tokens, first come first served. The loop is closed: as one
request ends, its client sends the next. There is no preemption; requests that cannot fit a slot are refused before the start.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from engines.decoder.batch import Batch, build_batch
from engines.decoder.side import DecoderSide
from engines.program import ReplayRequest, StepEvent
from hotpass.errors import InputError


@dataclass(kw_only=True, slots=True)
class Running:
    """One admitted request."""

    request: ReplayRequest
    slot: int
    computed: int = 0
    """Tokens whose KV is in the slot."""
    made: list[int] = field(default_factory=list)

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.request.tokens)

    @property
    def finished(self) -> bool:
        return len(self.made) >= self.request.output_tokens

    def next_tokens(self, count: int) -> list[int]:
        """The tokens that the next step computes: a chunk of the prompt, or the token made last."""
        if self.prefilling:
            return list(self.request.tokens[self.computed : self.computed + count])
        return self.made[-1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the loop may do at once."""

    sequences: int
    """Requests in service together, and so sequences in one step: the clients, or `max_batch` where that is less."""
    chunk_tokens: int
    """Prompt tokens in one step."""


class ServingLoop:
    """Requests over one side's serving slots."""

    def __init__(self, side: DecoderSide, limits: Limits, *, poison_freed: bool = False) -> None:
        """`poison_freed`: NaN into a slot's KV as it is freed, so that whoever reads it later shows."""
        self._side = side
        self._limits = limits
        self._poison = poison_freed
        first = side.plan.num_slots - side.plan.serving_slots
        self._free = deque(range(first, side.plan.num_slots))
        self._running: list[Running] = []
        self._steps = 0

    def run(self, requests: Sequence[ReplayRequest], emit: Callable[[StepEvent], None]) -> dict[int, list[int]]:
        """Serve all requests; request_id → tokens made. Raises InputError for one that no slot holds."""
        self._check(requests)
        waiting = deque(requests)
        made: dict[int, list[int]] = {}
        start = time.perf_counter()
        with torch.inference_mode():
            while waiting or self._running:
                self._admit(waiting)
                scheduled = self._schedule()
                batch, tokens = self._step(scheduled)
                event = StepEvent(
                    step=self._steps,
                    finished_tokens=tokens,
                    phase=batch.phase,
                    num_seqs=batch.num_seqs,
                    query_tokens=batch.query_tokens,
                    child_seconds=time.perf_counter() - start,
                )
                self._steps += 1
                self._retire(made)
                emit(event)
        return made

    def _admit(self, waiting: deque[ReplayRequest]) -> None:
        while waiting and self._free and len(self._running) < self._limits.sequences:
            self._running.append(Running(request=waiting.popleft(), slot=self._free.popleft()))

    def _schedule(self) -> list[tuple[Running, int]]:
        """(request, tokens) of the next step: decoding ones first, then prompts within the chunk."""
        scheduled = [(running, 1) for running in self._running if not running.prefilling]
        budget = self._limits.chunk_tokens
        for running in self._running:
            if not running.prefilling or budget == 0:
                continue
            take = min(budget, len(running.request.tokens) - running.computed)
            scheduled.append((running, take))
            budget -= take
        return scheduled

    def _step(self, scheduled: list[tuple[Running, int]]) -> tuple[Batch, tuple[tuple[int, int], ...]]:
        """Run it; the batch, and (request_id, token) of each token made."""
        tokens = [token for running, count in scheduled for token in running.next_tokens(count)]
        batch = build_batch(
            torch.tensor(tokens, device=self._side.device),
            contexts=[running.computed for running, _ in scheduled],
            query_lens=[count for _, count in scheduled],
            slots=[running.slot for running, _ in scheduled],
        )
        chosen = self._side.run(batch).argmax(dim=1).tolist()
        finished = []
        for (running, count), token in zip(scheduled, chosen, strict=True):
            running.computed += count
            if not running.prefilling:
                running.made.append(token)
                finished.append((running.request.request_id, token))
        return batch, tuple(finished)

    def _retire(self, made: dict[int, list[int]]) -> None:
        for running in [item for item in self._running if item.finished]:
            self._running.remove(running)
            made[running.request.request_id] = running.made
            self._free.append(running.slot)
            self._side.free_slot(running.slot, poison=self._poison)

    def _check(self, requests: Sequence[ReplayRequest]) -> None:
        longest = self._side.plan.serving_context
        for request in requests:
            tokens = len(request.tokens) + request.output_tokens
            if not request.tokens or request.output_tokens < 1:
                raise InputError("request", request.request_id, "has no prompt or no output", "drop it")
            if tokens > longest:
                raise InputError(
                    "request",
                    request.request_id,
                    f"needs {tokens} positions of {longest}",
                    "drop it or load more context",
                )


def logits_at(side: DecoderSide, tokens: Sequence[int], positions: Sequence[int], out: torch.Tensor) -> None:
    """Logits of some positions (ascending) of one text, each the end of a prefill chunk; `out` float32 [len(positions), vocab]."""
    slot, start = side.plan.num_slots - side.plan.serving_slots, 0
    ids = torch.tensor(list(tokens), device=side.device)
    with torch.inference_mode():
        for index, position in enumerate(positions):
            chunk = ids[start : position + 1]
            batch = build_batch(chunk, contexts=[start], query_lens=[len(chunk)], slots=[slot])
            out[index].copy_(side.run(batch)[0])
            start = position + 1
        side.free_slot(slot)


def score_text(side: DecoderSide, tokens: Sequence[int], chunk_tokens: int, out: torch.Tensor) -> None:
    """Logits of every position of one text into `out` float32 [len(tokens), vocab], one sequence at a time.

    The first half is decoded from the first token on; then a second slot gets it as prefill chunks, which must end in the same
    place, and decodes the rest: so both ways to compute a context are in the result. Nobody doubts the reference, which computes all
    positions in one pass.
    """
    if side.name == "reference" and side.net.ragged:
        _score_at_once(side, tokens, out)
        return
    length = len(tokens)
    half = max(1, length // 2)
    first = side.plan.num_slots - side.plan.serving_slots
    slots = (first, first + min(1, side.plan.serving_slots - 1))
    ids = torch.tensor(list(tokens), device=side.device)

    def step(slot: int, start: int, end: int) -> torch.Tensor:
        return side.run(build_batch(ids[start:end], contexts=[start], query_lens=[end - start], slots=[slot]))[0]

    with torch.inference_mode():
        for position in range(half - 1):
            out[position].copy_(step(slots[0], position, position + 1))
        side.free_slot(slots[0])
        for start in range(0, half, chunk_tokens):
            logits = step(slots[1], start, min(half, start + chunk_tokens))
        out[half - 1].copy_(logits)
        for position in range(half, length):
            out[position].copy_(step(slots[1], position, position + 1))
        side.free_slot(slots[1])


def _score_at_once(side: DecoderSide, tokens: Sequence[int], out: torch.Tensor) -> None:
    slot = side.plan.num_slots - side.plan.serving_slots
    ids = torch.tensor(list(tokens), device=side.device)
    batch = build_batch(ids, contexts=[0], query_lens=[len(ids)], slots=[slot])
    with torch.inference_mode():
        out.copy_(side.net.forward(batch, side.kv, every_position=True))
    side.free_slot(slot)
