"""What the slow tier replays: requests of the deployment's own traffic, as token ids, chosen anew for each seed.

A small budget cannot afford long answers, so a limit on output tokens may leave long requests out (never clip them); a replay then
stands for the shorter part of the traffic, and the plan says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from engines.program import ReplayRequest
from hotpass.traffic import Request, Traffic
from hotpass.traffic.text import fill

Encode = Callable[[str], list[int]]
MIN_CHOICE = 16
"""A limit that leaves fewer requests than this is raised until so many are left: a replay of one request is no traffic."""


def sample(traffic: Traffic, limit: int, max_output_tokens: int, max_context: int) -> Traffic:
    """At most `limit` requests that an engine can replay, spread evenly over the trace; `max_output_tokens` 0 is no limit."""
    usable = [request for request in traffic.requests if request.context <= max_context]
    if max_output_tokens:
        shortest = sorted(usable, key=lambda request: (request.output_tokens, request.input_tokens))
        least = shortest[:MIN_CHOICE][-1].output_tokens if shortest else 0
        usable = [request for request in usable if request.output_tokens <= max(max_output_tokens, least)]
    stride = max(1, len(usable) // limit)
    return replace(traffic, requests=tuple(usable[::stride][:limit]))


def replay_maker(traffic: Traffic, encode: Encode) -> Callable[[int, int, bool], Sequence[ReplayRequest]]:
    """(how many, seed, held out) → requests; the same seed gives the same, held-out ones have text that the search never saw."""

    def make(count: int, seed: int, held_out: bool) -> Sequence[ReplayRequest]:
        draw = random.Random(seed)
        chosen: list[Request] = [draw.choice(traffic.requests) for _ in range(count)]
        prompts = fill(replace(traffic, requests=tuple(chosen)), encode, seed, held_out=held_out)
        return [
            ReplayRequest(request_id=index, tokens=tuple(prompt), output_tokens=request.output_tokens)
            for index, (request, prompt) in enumerate(zip(chosen, prompts, strict=True))
        ]

    return make
