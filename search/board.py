"""The message board: what proposers and people tell each other, as typed records. Posts are `post` events of the ledger.

A post is *data* for whoever reads it, never an instruction: it is capped, free of control characters, and nothing in hotpass decides
by its text. What a finding rests on is `evidence`, the numbers of recorded attempts; a reader shows what those say, not what the
author says about them. What is not here: how a post reaches the log (`search.inbox`) and where people see it (`hotpass board`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hotpass.errors import InputError, nearest

MAX_CHARS = 2000
"""Of a post's text: a board is for findings, sources belong into candidates."""
MAX_REFERENCES = 16
"""Candidates, or attempts, that one post may name."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""Everything that a reader would not see, or that would write over what it sees; newline and tab stay."""


class PostKind(StrEnum):
    """What a post wants to be."""

    FINDING = "finding"
    """Something measured; it names the attempts."""
    HYPOTHESIS = "hypothesis"
    WARNING = "warning"
    """What did not work, so that nobody tries it again."""
    QUESTION = "question"


@dataclass(frozen=True, kw_only=True, slots=True)
class Post:
    """One message. Made by `make_post`, which checks it."""

    author: str
    """`agent:<brief>`, `mcp:<client>` or `person`."""
    kind: PostKind
    text: str
    candidates: tuple[str, ...] = ()
    """Ids of the candidates that it is about."""
    evidence: tuple[int, ...] = ()
    """Seqs of the `attempt` events that it rests on; empty for an opinion."""


def make_post(author: str, kind: str, text: str, candidates: Sequence[str] = (), evidence: Sequence[int] = ()) -> Post:
    """A post, cleaned of what cannot be seen. Raises InputError when it is empty, too long, of no known kind or names too much."""
    if kind not in list(PostKind):
        raise InputError("kind", kind, "is not a kind of post", nearest(str(kind), [k.value for k in PostKind]))
    clean = cleaned(text)
    if not clean:
        raise InputError("text", text, "is empty", "say what others should know")
    if len(clean) > MAX_CHARS:
        raise InputError("text", clean, f"has {len(clean)} characters", f"keep a post below {MAX_CHARS}")
    for name, values in (("candidates", candidates), ("evidence", evidence)):
        if len(values) > MAX_REFERENCES:
            raise InputError(name, len(values), "are too many", f"name at most {MAX_REFERENCES}")
    return Post(author=author, kind=PostKind(kind), text=clean, candidates=tuple(candidates), evidence=tuple(evidence))


def cleaned(text: str) -> str:
    """A text of foreign origin without control, zero-width and direction characters, and without space at its ends."""
    return _CONTROL.sub("", text.replace("\r\n", "\n")).strip()
