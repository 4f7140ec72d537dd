"""The shape table of a deployment: which steps its traffic makes, and how often. It has no clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What a step does: `prefill` reads prompts, `decode` makes one token a sequence, `mixed` does both; `forward` is a whole call of a
    module, which keeps nothing from one step to the next."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    FORWARD = "forward"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeRow:
    """One bucket of steps."""

    phase: Phase
    num_seqs: int
    """Sequences in the step."""
    query_tokens: int
    """Tokens computed in the step, over all sequences (decode: equal to num_seqs)."""
    context_mean: int
    """Mean tokens already in the KV cache for each sequence, before the step."""
    context_max: int
    """The longest of those."""
    steps_share: float
    """Share of all steps that fall in this bucket; the table sums to 1."""
    tokens_share: float
    """Share of all *output* tokens made in this bucket (a prefill that ends a prompt makes one); sums to 1."""
    name: str = ""
    """Of the example input that a module's row stands for; empty for steps of traffic."""

    @property
    def key(self) -> str:
        """As `decode n8 q8 c768`, or `forward pairs n8 q1024`."""
        if self.name:
            return f"{self.phase} {self.name} n{self.num_seqs} q{self.query_tokens}"
        return f"{self.phase} n{self.num_seqs} q{self.query_tokens} c{self.context_mean}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeTable:
    """Rows, and what they were counted from."""

    rows: tuple[ShapeRow, ...]
    concurrency: int
    chunk_tokens: int
    """Prefill chunk size in tokens that the simulation used."""
    num_steps: int
    """Steps that were counted before bucketing."""
    output_tokens_per_step: float
    """Output tokens ÷ steps over the whole count: tokens/s = this ÷ Σ steps_share·time."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("a shape table needs at least one row")
