"""What the step that runs now is, as vLLM's own attention metadata tells it; and whether a part's domain serves it."""

from __future__ import annotations

import itertools
from typing import Any

from hotpass.domain import Domain


class Step:
    """Facts of the running step, read once a step however many slots ask."""

    def __init__(self) -> None:
        self._metadata: Any = None
        self._facts: dict[str, Any] = {}
        self._serves: dict[Domain, bool] = {}

    def within(self, domain: Domain) -> bool:
        """Whether the domain serves this step; False where there is none (vLLM's own dry runs)."""
        facts = self.facts()
        if not facts:
            return False
        if domain not in self._serves:
            self._serves[domain] = domain.serves(**facts)
        return self._serves[domain]

    def facts(self) -> dict[str, Any]:
        """`phase`, `num_seqs`, `query_tokens`, `context` (longest, tokens in the cache before the step); empty outside a step."""
        metadata = _metadata()
        if metadata is not self._metadata:
            self._metadata = metadata
            self._facts = _facts(metadata) if metadata is not None else {}
            self._serves = {}
        return self._facts


def _metadata() -> Any:
    """Of the first attention layer: all of one model run on the same batch."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return None
    by_layer = get_forward_context().attn_metadata
    return next(iter(by_layer.values()), None) if by_layer else None


def _facts(metadata: Any) -> dict[str, Any]:
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    queries = [end - start for start, end in itertools.pairwise(starts)]
    contexts = [length - query for length, query in zip(lengths, queries, strict=False)]
    decoding = [query == 1 and context > 0 for query, context in zip(queries, contexts, strict=True)]
    phase = "decode" if all(decoding) else "mixed" if any(decoding) else "prefill"
    return {"phase": phase, "num_seqs": len(queries), "query_tokens": sum(queries), "context": max(contexts)}
