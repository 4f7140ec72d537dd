"""What traffic is: requests in order of arrival, and what was left out of them. Plain records; readers and presets make them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hotpass.errors import InputError, nearest
from hotpass.records.deployment import TrafficRef


class Format(StrEnum):
    """Where requests come from."""

    MOONCAKE = "mooncake"
    """JSON lines: timestamp (ms), input_length, output_length, perhaps hash_ids."""
    AZURE = "azure"
    """CSV: TIMESTAMP, ContextTokens, GeneratedTokens."""
    BURSTGPT = "burstgpt"
    """CSV: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type."""
    OPENAI_LOG = "openai-log"
    """JSON lines with `messages` or `prompt`, and the response or its usage."""
    PRESET = "preset"

    @classmethod
    def named(cls, name: str) -> Format:
        """The file format of that name. Raises InputError."""
        known = [item.value for item in cls if item is not cls.PRESET]
        if name not in known:
            raise InputError("traffic format", name, "is not known", nearest(name, known))
        return cls(name)


class Lengths(StrEnum):
    """How the token counts of a request came about."""

    GIVEN = "given"
    """The trace says so, in tokens of the model that served it."""
    COUNTED = "counted"
    """Its text was encoded with the tokenizer of the deployment."""
    ESTIMATED = "estimated"
    """From the length of its text, four UTF-8 bytes a token: a guess, until a tokenizer counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request."""

    arrival_ms: float
    """Since the first request used; 0 for all when the source has no clock."""
    input_tokens: int
    output_tokens: int
    prefix_hashes: tuple[int, ...] = ()
    """Ids of the leading blocks of the prompt: two requests have the same text in exactly their leading equal ids."""
    block_tokens: int = 0
    """Tokens a block; 0 when there are no prefix hashes. The last block may be shorter."""
    text: str | None = None
    """The prompt as text; None when the source has lengths only."""
    response: str | None = None
    """What was answered, as text; None when the source does not have it."""
    lengths: Lengths = Lengths.GIVEN
    asked_input_tokens: int | None = None
    """Input tokens that the source claims, where another tokenizer counted `input_tokens`; None otherwise."""

    @property
    def context(self) -> int:
        """Tokens that the model must hold at the end: input and output."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """Requests left out for one reason."""

    requests: int
    tokens: int
    """Input and output tokens of those."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Requests in order of arrival. Made by `hotpass.traffic.read_traffic`."""

    ref: TrafficRef
    requests: tuple[Request, ...]
    has_clock: bool
    """False when the source has no arrival times."""
    dropped: Mapping[str, Dropped] = field(default_factory=dict)
    """What was left out, by reason; `ref.dropped` has the same counts."""
    note: str = ""
    """Where a preset's numbers come from; empty for a file."""

    @property
    def tokens(self) -> int:
        """Input and output tokens of the requests used."""
        return sum(request.context for request in self.requests)


def make_traffic(
    name: str,
    source_format: Format,
    requests: tuple[Request, ...],
    *,
    has_clock: bool,
    dropped: Mapping[str, Dropped],
    note: str = "",
) -> Traffic:
    """Traffic with its identity. Raises InputError when no request is left."""
    if not requests:
        reasons = ", ".join(f"{count.requests} {reason}" for reason, count in dropped.items()) or "the source is empty"
        raise InputError("traffic", name, f"has no usable request ({reasons})", _remedy(dropped))
    ref = TrafficRef(
        name=name,
        source_format=source_format.value,
        content_hash=_hash(requests),
        num_requests=len(requests),
        dropped={reason: count.requests for reason, count in dropped.items()},
        content_valid=all(request.text is not None for request in requests),
    )
    return Traffic(ref=ref, requests=requests, has_clock=has_clock, dropped=dict(dropped), note=note)


def _hash(requests: tuple[Request, ...]) -> str:
    """SHA-256 over everything that a replay depends on; how lengths were found out is not part of it."""
    digest = hashlib.sha256()
    for request in requests:
        fields = (
            request.arrival_ms,
            request.input_tokens,
            request.output_tokens,
            request.block_tokens,
            request.prefix_hashes,
            request.text,
        )
        digest.update(repr(fields).encode())
    return digest.hexdigest()


def _remedy(dropped: Mapping[str, Dropped]) -> str:
    if BEYOND_CONTEXT in dropped:
        return "use traffic with shorter requests (preset 'chat') or a model with a longer context"
    return "give a trace in which requests have an input and an output"


BEYOND_CONTEXT = "beyond-context"
"""Input and output together exceed the context that the model allows."""
BEYOND_LIMIT = "beyond-limit"
"""Usable, and later in the source than the number of requests that was asked for."""
NO_INPUT = "no-input"
NO_OUTPUT = "no-output"
"""No output token was made or logged (a failed request)."""
NOT_TEXT = "not-text"
"""The prompt has images, audio, token ids or several prompts in one."""
