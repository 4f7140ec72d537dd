"""Contexts of shape rows: KV computed once by the reference, sealed, and copied into a side's slots whenever it is installed.

Where the program can, what all rows hold is an image, and copying a mapping (`engines.decoder.kv_image`). All rows share texts: sequence i of every row has the first tokens of text i, so that its KV is the start of the longest one's. A
table of six rows at four sequences costs the reference four texts instead of twenty-four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.client import Child, token_bytes
from engines.judge.inputs import TokenSource
from engines.memory import MemoryIndex, SealedMemory, check_sealed
from engines.program import KvPlan
from engines.wire import close_all
from hotpass.decode import from_plain


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """KV of some sequences on one cut, as the reference child sealed it."""

    cut: int
    sequences: tuple[int, ...]
    memory: SealedMemory


class Contexts:
    """The contexts of an engine's rows, on every cut."""

    def __init__(self, kv: KvPlan) -> None:
        self._kv = kv
        self._blocks: list[_Block] = []
        self._images: dict[int, int] = {}
        """Cut → descriptor of its sealed image."""

    def compute(self, child: Child, num_cuts: int, source: TokenSource, deadline: float) -> None:
        """By the reference child, which then has them as every other child gets them. Raises CandidateFailed."""
        lengths = [self._kv.row_contexts(row) for row in range(len(self._kv.rows))]
        texts = [list(source.draw(length)) for length in longest_contexts(lengths)]
        for cut in range(num_cuts):
            for row, sequences in computed_in(lengths).items():
                block = self._computed(child, cut, row, sequences, texts, deadline)
                self._blocks.append(block)
                _keep(child, block, deadline)
            self._take_image(child, cut, deadline)

    def hand_to(self, child: Child, deadline: float) -> None:
        """Let a child map all of them."""
        for block in self._blocks:
            _keep(child, block, deadline)
        for cut, fd in self._images.items():
            child.call_plain("keep_image", {"cut": cut}, deadline=deadline, fds=(fd,))

    def load(self, child: Child, side: str, places: Sequence[tuple[int, int]], deadline: float) -> None:
        """Copy them into a side's slots of those (cut, row) places."""
        for cut in sorted({cut for cut, _ in places}):
            rows = [(row, self._kv.row_contexts(row)) for at, row in places if at == cut]
            child.call_plain("load_contexts", {"side": side, "cut": cut, "rows": rows}, deadline=deadline)

    def close(self) -> None:
        for block in self._blocks:
            block.memory.close()
        self._blocks.clear()
        close_all(tuple(self._images.values()))
        self._images.clear()

    def _take_image(self, child: Child, cut: int, deadline: float) -> None:
        """The child has it too from then on, as every other gets it."""
        rows = [(row, self._kv.row_contexts(row)) for row in range(len(self._kv.rows))]
        message = child.call("image_contexts", {"cut": cut, "rows": rows}, deadline=deadline)
        if message.fds:
            self._images[cut] = message.fds[0]
            close_all(message.fds[1:])
            check_sealed(message.fds[0], MemoryIndex(tensors=(), num_bytes=0))
            child.call_plain("keep_image", {"cut": cut}, deadline=deadline, fds=(message.fds[0],))

    def _computed(
        self,
        child: Child,
        cut: int,
        row: int,
        sequences: Sequence[int],
        texts: Sequence[Sequence[int]],
        deadline: float,
    ) -> _Block:
        """Some sequences, computed in a row's slots; the row's other sequences stay empty."""
        count = self._kv.rows[row].num_seqs
        tokens = [list(texts[index]) if index in sequences else [] for index in range(count)]
        body = {"cut": cut, "row": row, "lengths": [len(item) for item in tokens]}
        blob = token_bytes([token for item in tokens for token in item])
        message = child.call("compute_contexts", body, deadline=deadline, blob=blob)
        memory = SealedMemory(fd=message.fds[0], index=from_plain(MemoryIndex, message.body["index"]))
        close_all(message.fds[1:])
        check_sealed(memory.fd, memory.index)
        return _Block(cut=cut, sequences=tuple(sequences), memory=memory)


def longest_contexts(lengths: Sequence[Sequence[int]]) -> list[int]:
    """For each sequence index, the longest context that any row has there."""
    count = max(len(row) for row in lengths)
    return [max(row[index] for row in lengths if index < len(row)) for index in range(count)]


def computed_in(lengths: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Row → sequences whose longest context is that row's: each is computed once, in slots that are long enough."""
    chosen: dict[int, list[int]] = {}
    for index, longest in enumerate(longest_contexts(lengths)):
        row = next(row for row, item in enumerate(lengths) if index < len(item) and item[index] == longest)
        chosen.setdefault(row, []).append(index)
    return chosen


def _keep(child: Child, block: _Block, deadline: float) -> None:
    body = {"cut": block.cut, "sequences": block.sequences, "index": block.memory.index}
    child.call_plain("keep_contexts", body, deadline=deadline, fds=(block.memory.fd,))
