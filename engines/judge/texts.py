"""Where an engine's tokens come from: corpus text for windows, the deployment's own requests for replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from engines.judge.inputs import RandomTokens, SourceMaker, TokenSource, seed_of
from engines.program import ReplayRequest
from hotpass.errors import InputError
from hotpass.records.deployment import Deployment, ModelRef
from hotpass.traffic import PRESETS, Request, TextSource, Traffic, fill, read_traffic

RequestMaker = Callable[[int, int, bool], Sequence[ReplayRequest]]
"""(how many, seed, held out) → requests to replay."""


def text_sources(model: ModelRef) -> SourceMaker:
    """Text of the bundled corpus through the model's tokenizer; uniform token ids for a model without one."""
    from engines.prepare.store import load_tokenizer

    try:
        encode = load_tokenizer(model).encode
    except InputError:
        return lambda seed, held_out: RandomTokens(model.vocab_size, seed_of(seed, held_out))

    def source(seed: int, held_out: bool) -> TokenSource:
        return TextSource(encode, seed, held_out=held_out)

    return source


def traffic_requests(source: str, deployment: Deployment) -> RequestMaker:
    """The requests of a preset or a file, with prompts of their own text or, where they have lengths only, of the corpus.

    Raises InputError when the traffic cannot be read here, or is not the deployment's.
    """
    from engines.prepare.store import load_tokenizer

    if source not in PRESETS and not Path(source).exists():
        raise InputError("traffic", source, "is neither a preset nor a file here", "give the engine the traffic's path")
    encode = load_tokenizer(deployment.model).encode
    traffic = read_traffic(source, max_context=deployment.model.max_context, encode=encode)

    def requests(count: int, seed: int, held_out: bool) -> Sequence[ReplayRequest]:
        start = seed % max(1, len(traffic.requests) - count)
        chosen = traffic.requests[start : start + count]
        prompts = fill(_part_of(traffic, chosen), encode, seed, held_out=held_out)
        return [
            ReplayRequest(request_id=index, tokens=tuple(prompt), output_tokens=item.output_tokens)
            for index, (item, prompt) in enumerate(zip(chosen, prompts, strict=True))
        ]

    return requests


def _part_of(traffic: Traffic, requests: tuple[Request, ...]) -> Traffic:
    return replace(traffic, requests=requests)
