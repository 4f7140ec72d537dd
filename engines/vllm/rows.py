"""Rows of the shape table in vLLM's pages: each sequence of each side has pages of its own, and steps on top of its context.

load_contexts ──► pages        steps, calls ──► logits of a window        answer ──► the last position again, as loaded
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from engines.program import KvPlan
from engines.vllm.steps import Pages, Sequences, write_kv
from hotpass.records.shapes import Phase

PREFILL_CHUNK = 64
"""Tokens of a step that computes a context: no engine's steps are shorter than its rows', and few rows are."""


class Rows:
    """All rows of some sides. Whose parts run is not its business."""

    def __init__(self, core: Any, pages: Pages, plan: KvPlan, sides: Sequence[str]) -> None:
        self._core, self._pages, self._plan = core, pages, plan
        self._held = {
            (side, row): [pages.take(count) for count in self._positions(row)]
            for side in sides
            for row in range(len(plan.rows))
        }
        self._ended: dict[tuple[str, int], list[int]] = {}
        """(side, row) → positions written after the last window."""

    def load_contexts(self, side: str, row: int, contexts: Sequence[torch.Tensor]) -> None:
        """Keys and values float32 [layers, 2, kv_heads, positions, head_dim] of each sequence; or its token ids (int64 [positions]),
        where the reference keeps a cache that is not vLLM's: whatever is active then computes them."""
        for blocks, context in zip(self._held[side, row], contexts, strict=True):
            if context.ndim == 1:
                self._prefill(blocks, context.tolist())
            elif context.shape[-2]:
                write_kv(self._core, self._pages, blocks, context)

    def steps(self, side: str, row: int, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits [num_seqs, vocab] of each step of a window: decode goes on, the others repeat theirs."""
        for step in self.calls(side, row, tokens):
            yield step()

    def contexts(self, row: int) -> list[tuple[int, int]]:
        """Of each sequence of a row: positions before its first step, and tokens of a step."""
        return list(zip(self._plan.row_contexts(row), self._plan.row_query_lens(row), strict=True))

    def calls(self, side: str, row: int, tokens: torch.Tensor) -> Iterator[Callable[[], torch.Tensor]]:
        """The same as calls, each of which computes a step; what the step takes is ready before it is given."""
        contexts, queries = self._plan.row_contexts(row), self._plan.row_query_lens(row)
        pages = self._held[side, row]
        split = [list(torch.split(step, list(queries))) for step in tokens]
        if self._plan.rows[row].phase is Phase.DECODE:
            own = [[int(step[index]) for step in split] for index in range(len(queries))]
            with Sequences(self._core, pages, contexts, own) as sequences:
                for _ in split:
                    yield partial(sequences.step, queries)
            self._ended[side, row] = [context + len(split) for context in contexts]
            return
        for step in split:
            with Sequences(self._core, pages, contexts, [part.tolist() for part in step]) as sequences:
                yield partial(sequences.step, queries)
        self._ended[side, row] = [context + query for context, query in zip(contexts, queries, strict=True)]

    def warm(self, side: str, rows: Sequence[int] | None = None) -> None:
        """A step or two of those rows, None is every one; what they write lies where windows will write."""
        for row in range(len(self._plan.rows)) if rows is None else rows:
            item = self._plan.rows[row]
            steps = 2 if item.phase is Phase.DECODE else 1
            for _ in self.steps(side, row, torch.ones(steps, item.query_tokens, dtype=torch.int64)):
                pass

    def answer(self, side: str, row: int, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [num_seqs, vocab] of the last position of each sequence, again, on the pages that the side's last window left."""
        ends, own = self._ended[side, row], [[token] for token in tokens]
        with Sequences(self._core, self._held[side, row], [end - 1 for end in ends], own) as sequences:
            return sequences.step([1] * len(own)).clone()

    def _prefill(self, blocks: Sequence[Any], tokens: Sequence[int]) -> None:
        with Sequences(self._core, [blocks], [0], [tokens]) as sequences:
            for start in range(0, len(tokens), PREFILL_CHUNK):
                sequences.step([min(PREFILL_CHUNK, len(tokens) - start)])

    def _positions(self, row: int) -> list[int]:
        """Positions that each sequence of a row may come to hold."""
        steps = self._plan.steps_per_window[row] if self._plan.rows[row].phase is Phase.DECODE else 1
        pairs = zip(self._plan.row_contexts(row), self._plan.row_query_lens(row), strict=True)
        return [context + query * steps for context, query in pairs]
