"""Replays: requests through the program's continuous-batching loop, each step stamped by the judge as it arrives.

    judge ── requests ──► child: step, step, step …        each step's message ──► stamp; first token ──► TTFT; next request submitted

The loop is closed: `concurrency` clients, each submits its next request when its last one has ended. So the judge knows when a
request was submitted without being told: the first ones at the start, each further one at the end of an earlier one.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engines.client import Child, token_bytes
from engines.judge.windows import check_echo
from engines.program import CandidateFailed, ReplayReply, ReplayRequest, StepEvent
from hotpass.records.measurement import Failure, FailureKind, ReplayStats


@dataclass(kw_only=True, slots=True)
class _Progress:
    """One request under way, by the judge's clock, in seconds since the replay began."""

    output_tokens: int
    submitted: float = 0.0
    first: float | None = None
    last: float = 0.0
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What one replay gave."""

    stats: ReplayStats
    tokens: Mapping[int, tuple[int, ...]]
    """Request id → the tokens made for it."""
    activation: Mapping[str, int]


def run_replay(child: Child, side: str, requests: Sequence[ReplayRequest], concurrency: int, deadline: float) -> Replay:
    """Replay requests on a side. Raises CandidateFailed, also when the loop made other tokens than were asked for."""
    body = {
        "side": side,
        "concurrency": concurrency,
        "requests": [
            {"id": item.request_id, "length": len(item.tokens), "output_tokens": item.output_tokens}
            for item in requests
        ],
    }
    blob = token_bytes(np.concatenate([np.array(item.tokens, dtype=np.int64) for item in requests]))
    progress = {item.request_id: _Progress(output_tokens=item.output_tokens) for item in requests}
    waiting = deque(item.request_id for item in requests[concurrency:])
    steps = 0
    start = time.perf_counter()
    child.start("replay", body, deadline=deadline, blob=blob)
    while (message := child.next_message(deadline)).kind == "step":
        now = time.perf_counter() - start
        steps += 1
        _note(child, child.decoded(StepEvent, message.body), progress, waiting, now)
    wall = time.perf_counter() - start
    reply = child.decoded(ReplayReply, message.body)
    check_echo(child, side, reply.echo)
    unfinished = [number for number, item in progress.items() if len(item.tokens) != item.output_tokens]
    if unfinished:
        raise _wrong(f"{len(unfinished)} requests did not get the tokens they asked for, the first is {unfinished[0]}")
    return Replay(
        stats=_stats(list(progress.values()), wall, steps),
        tokens={number: tuple(item.tokens) for number, item in progress.items()},
        activation=Counter(reply.activation),
    )


def _note(child: Child, event: StepEvent, progress: Mapping[int, _Progress], waiting: deque[int], now: float) -> None:
    for number, token in event.finished_tokens:
        item = progress.get(number)
        if item is None or len(item.tokens) >= item.output_tokens:
            raise child.broken(f"a token for request {number}, which did not ask for it")
        item.tokens.append(token)
        item.first = now if item.first is None else item.first
        item.last = now
        if len(item.tokens) == item.output_tokens and waiting:
            progress[waiting.popleft()].submitted = now


def _stats(done: Sequence[_Progress], wall: float, steps: int) -> ReplayStats:
    return ReplayStats(
        num_requests=len(done),
        output_tokens=sum(item.output_tokens for item in done),
        wall_seconds=wall,
        ttft_ms=tuple(((item.first or 0.0) - item.submitted) * 1e3 for item in done),
        tpot_ms=tuple(
            (item.last - (item.first or 0.0)) / (item.output_tokens - 1) * 1e3
            for item in done
            if item.output_tokens > 1
        ),
        steps=steps,
    )


def _wrong(message: str) -> CandidateFailed:
    return CandidateFailed(Failure(kind=FailureKind.PROTOCOL, message=message))


def requests_for(requests: Sequence[ReplayRequest], output_tokens: float, least: int) -> Sequence[ReplayRequest]:
    """The shortest prefix that makes so many output tokens, of at least `least` requests."""
    made = 0
    for count, item in enumerate(requests, start=1):
        made += item.output_tokens
        if made >= output_tokens and count >= least:
            return requests[:count]
    return requests
