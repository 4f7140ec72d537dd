"""Token ids from real text, in exact lengths: for traffic that has lengths only, and for inputs of measurements.

The corpus (prose and code, `corpus/README.txt`) is cut into sections; every sixth is held out for cold measurements and
gates. A pass over the others cuts them into pieces, shuffles those, and hands out their tokens in a row, so nothing is drawn
twice within a pass. The next pass cuts at other places and shuffles anew.

Not done here: content that fits a request. Corpus text under a trace's lengths is not that trace's content, and whoever
depends on content (speculative decoding, expert routing) must look at `TrafficRef.content_valid`.
"""

from __future__ import annotations

import functools
import gzip
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from hotpass.errors import InputError
from hotpass.traffic.read import Encode
from hotpass.traffic.records import Request, Traffic

KINDS = ("prose", "code")
SECTION_CHARS = 24_000
"""A section ends at the first blank line after so many characters."""
HELD_OUT_EVERY = 6
"""The last of every so many sections of the whole corpus is held out."""
PIECE_CHARS = 6_000
"""A piece ends at the first line end after so many characters: about 1,500 tokens."""

Tokens = tuple[int, ...]


class TextSource:
    """Draws token-id sequences of exact length from the corpus, each from another place."""

    def __init__(self, encode: Encode, seed: int, *, held_out: bool = False) -> None:
        """`encode` must not add special tokens (InputError otherwise): they would stand in the middle of texts.

        Two sources of one seed draw the same; `held_out=True` draws from the part that other draws never touch.
        """
        if encode(""):
            raise InputError("tokenizer", encode(""), "is what no text becomes", "encode without adding special tokens")
        self._encode, self._seed, self._held_out = encode, seed, held_out
        self._left: list[int] = []
        self._pieces: Iterator[str] = iter(())
        self.passes = 0
        """Passes over the corpus begun; above 1, text has been drawn again (cut at other places)."""

    def draw(self, num_tokens: int) -> Tokens:
        """Exactly so many token ids."""
        if num_tokens < 0:
            raise InputError("num_tokens", num_tokens, "is negative", "give a whole number of at least 0")
        drawn: list[int] = []
        while len(drawn) < num_tokens:
            if not self._left:
                self._left = self._next_piece()
            take = num_tokens - len(drawn)
            drawn += self._left[:take]
            self._left = self._left[take:]
        return tuple(drawn)

    def _next_piece(self) -> list[int]:
        """Tokens of the next piece that has any."""
        begun = self.passes
        while True:
            for piece in self._pieces:
                tokens = list(self._encode(piece))
                if tokens:
                    return tokens
            if self.passes > begun + 1:
                raise InputError(
                    "tokenizer", "", "gives no token for the whole corpus", "use the model's own tokenizer"
                )
            order = random.Random(f"hotpass-text:{self._seed}:{self.passes}")
            pieces = [piece for section in sections(self._held_out) for piece in _cut(section, order.random())]
            # Sorting by draws of random() is the one shuffle that Python promises to keep from version to version.
            self._pieces = iter([piece for _, piece in sorted((order.random(), piece) for piece in pieces)])
            self.passes += 1


def fill(
    traffic: Traffic, encode: Encode, seed: int, limit: int | None = None, *, held_out: bool = False
) -> tuple[Tokens, ...]:
    """A prompt of token ids for each of the first `limit` requests (all by default).

    A request with text keeps it, encoded anew: its length may differ from the one asked for (`realised`). A request with a
    length gets corpus text of exactly that length; equal leading prefix blocks become equal tokens, other blocks other text.
    """
    source = TextSource(encode, seed, held_out=held_out)
    blocks: dict[tuple[int, int], Tokens] = {}
    requests = traffic.requests if limit is None else traffic.requests[:limit]
    return tuple(
        tuple(encode(request.text)) if request.text is not None else _prompt(request, source, blocks)
        for request in requests
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Realised:
    """Prompt lengths asked for against those that came out."""

    requests: int
    asked_tokens: int
    realised_tokens: int
    mismatched: int
    """Requests whose length is not the one asked for; always 0 for traffic without text."""
    worst: int
    """Largest difference of one request, tokens."""

    @property
    def exact(self) -> bool:
        return self.mismatched == 0


def realised(traffic: Traffic, prompts: Sequence[Sequence[int]]) -> Realised:
    """How prompts made by `fill` compare with what the traffic asked for."""
    asked = [request.input_tokens for request in traffic.requests[: len(prompts)]]
    differences = [abs(len(prompt) - tokens) for prompt, tokens in zip(prompts, asked, strict=True)]
    return Realised(
        requests=len(prompts),
        asked_tokens=sum(asked),
        realised_tokens=sum(map(len, prompts)),
        mismatched=sum(difference > 0 for difference in differences),
        worst=max(differences, default=0),
    )


@functools.cache
def sections(held_out: bool) -> tuple[str, ...]:
    """The corpus, or its held-out part, in sections; the two are disjoint and together are the whole."""
    documents = [document for kind in KINDS for document in _corpus(kind).split("\f")]
    whole = [section for document in documents for section in _split(document, SECTION_CHARS, "\n\n")]
    return tuple(
        section for index, section in enumerate(whole) if (index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out
    )


def _corpus(kind: str) -> str:
    packed = (resources.files("hotpass.traffic") / "corpus" / f"{kind}.txt.gz").read_bytes()
    return gzip.decompress(packed).decode("utf-8")


def _prompt(request: Request, source: TextSource, blocks: dict[tuple[int, int], Tokens]) -> Tokens:
    """Corpus text of the request's length: block by block, then what no block covers."""
    tokens: Tokens = ()
    for block in request.prefix_hashes:
        size = min(request.block_tokens, request.input_tokens - len(tokens))
        key = (block, request.block_tokens)
        if len(blocks.get(key, ())) < size:
            blocks[key] = blocks.get(key, ()) + source.draw(size - len(blocks.get(key, ())))
        tokens += blocks[key][:size]
    return tokens + source.draw(request.input_tokens - len(tokens))


def _cut(section: str, offset: float) -> Iterator[str]:
    """Pieces of a section; the first one is shorter by the offset (a share of a piece), so that cuts fall elsewhere."""
    first = section.find("\n", int(offset * PIECE_CHARS)) + 1
    yield from (piece for part in (section[:first], section[first:]) for piece in _split(part, PIECE_CHARS, "\n"))


def _split(text: str, least_chars: int, border: str) -> Iterator[str]:
    """Parts of at least so many characters that end behind a border; the last may be shorter."""
    start = 0
    while start < len(text):
        end = text.find(border, start + least_chars)
        end = len(text) if end < 0 else end + len(border)
        yield text[start:end]
        start = end
