"""Inputs of a module's rows: what they look like, how fresh ones are drawn, and how they travel to a child.

    example ──described──► InputSpec a tensor ──drawn by the judge (numpy)──► words int64 ──decoded by the child──► tensors, arguments

A step's words are the bytes of its drawn tensors, one after the other, each padded to 8 bytes: integers as int64, floating values as
float32. Constants (masks, flags, plain values) do not travel. What is not here: torch, since the judge uses none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotpass.records.candidate import Value

WORD = 8
"""Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """One argument of a module's forward."""

    name: str
    """Keyword; of a positional argument its index, as `0`."""
    kind: str
    """`integers` or `normal`: drawn anew for each step · `tensor`: as in the example · `plain`: a value that is no tensor."""
    dtype: str = ""
    """torch's name, as `int64`; empty for a plain value."""
    shape: tuple[int, ...] = ()
    low: int = 0
    """Of `integers`: the least value in the example."""
    high: int = 0
    """Of `integers`: the largest value in the example, drawn too."""
    mean: float = 0.0
    """Of `normal`: the example's."""
    std: float = 0.0
    """Of `normal`: the example's."""
    value: Value = None
    """Of `plain`."""

    @property
    def is_drawn(self) -> bool:
        return self.kind in ("integers", "normal")

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_words(self) -> int:
        """Of a step; 0 for what does not travel."""
        if not self.is_drawn:
            return 0
        return self.num_values if self.kind == "integers" else -(-self.num_values * 4 // WORD)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSpec:
    """One tensor in what a module's forward returns."""

    path: str
    """Where it is in the answer, as `logits` or `1.hidden`; empty when the answer is the tensor."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleSpec:
    """One named example input of a module: a row of its shape table."""

    name: str
    share: float
    """Share of all calls; the examples' sum to 1."""
    batch: int
    """Items in the call: the length of the first dimension of the first tensor of at least two dimensions, else 1."""
    length: int
    """Length of that tensor's second dimension, else 1."""
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    by_item: bool
    """True when the first dimension of every output is the batch, so that answers can be told apart item by item."""
    width: int
    """Values that are compared of each item: the answer as float32, wider types as two."""
    flops: int
    """Of one call, counted over torch's operators as loaded."""
    streamed_bytes: int
    """Of weights that one call must read whatever it does: those of linear, convolution and recurrent layers that ran."""

    @property
    def num_words(self) -> int:
        return sum(item.num_words for item in self.inputs)


def draw_step(example: ExampleSpec, rng: np.random.Generator) -> np.ndarray:
    """int64 [words]: fresh values for every drawn input."""
    pieces = [_drawn(item, rng) for item in example.inputs if item.is_drawn]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def places(example: ExampleSpec) -> Iterator[tuple[InputSpec, slice]]:
    """Each drawn input with its place among the words of a step."""
    start = 0
    for item in example.inputs:
        if item.is_drawn:
            yield item, slice(start, start + item.num_words)
            start += item.num_words


class ModuleInputs:
    """Fresh inputs for the judge (`engines.judge.inputs.StepSource`); `draw` gives seeds, from which a child draws by itself."""

    def __init__(self, examples: Sequence[ExampleSpec], seed: int) -> None:
        self._examples = tuple(examples)
        self._rng = np.random.default_rng(seed)

    def steps(self, row: int, count: int) -> np.ndarray:
        """int64 [count, words of a step]."""
        return np.stack([draw_step(self._examples[row], self._rng) for _ in range(count)])

    def draw(self, count: int) -> Sequence[int]:
        """Seeds for `seeded_step`."""
        seeds: list[int] = self._rng.integers(0, 1 << 62, size=count).tolist()
        return seeds


def seeded_step(examples: Sequence[ExampleSpec], seed: int) -> tuple[int, np.ndarray]:
    """(row, words) that a seed stands for: rows in proportion to their shares."""
    rng = np.random.default_rng(seed)
    row = int(rng.choice(len(examples), p=[example.share for example in examples]))
    return row, draw_step(examples[row], rng)


def widened(example: ExampleSpec) -> ExampleSpec:
    """The same for a module whose half-precision values are float32."""
    return replace(
        example,
        inputs=tuple(replace(item, dtype=_wide(item.dtype)) for item in example.inputs),
        outputs=tuple(replace(item, dtype=_wide(item.dtype)) for item in example.outputs),
    )


def _wide(dtype: str) -> str:
    return "float32" if dtype in ("bfloat16", "float16") else dtype


def _drawn(item: InputSpec, rng: np.random.Generator) -> np.ndarray:
    if item.kind == "integers":
        return rng.integers(item.low, item.high, size=item.num_values, endpoint=True, dtype=np.int64)
    values = np.zeros(item.num_words * 2, dtype=np.float32)
    drawn = rng.standard_normal(item.num_values, dtype=np.float32)
    values[: item.num_values] = drawn * np.float32(item.std) + np.float32(item.mean)
    return values.view(np.int64)
