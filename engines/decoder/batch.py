"""One step's inputs, flat and ragged, and the builders for them.

What is not here: which tokens to run (the judge and the serving loop decide), and where their KV lies in memory (`kv`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Inputs of one step (`engines.protocol.Batch`). Tensors are int64 on the engine's device."""

    tokens: torch.Tensor
    """[T] token ids."""
    positions: torch.Tensor
    """[T] position of each token in its sequence = its place in the KV slot."""
    seq_starts: torch.Tensor
    """[num_seqs + 1] offsets into T."""
    slots: torch.Tensor
    """[num_seqs] KV slot of each sequence."""
    phase: str
    """`decode`, `prefill` or `mixed`."""
    num_seqs: int
    query_tokens: int
    """T."""
    context: int
    """Longest context (tokens in the cache before this step)."""
    host_seq_starts: tuple[int, ...]
    host_contexts: tuple[int, ...]
    host_slots: tuple[int, ...]

    def query_len(self, sequence: int) -> int:
        """Tokens of one sequence in this step."""
        return self.host_seq_starts[sequence + 1] - self.host_seq_starts[sequence]


def phase_of(contexts: Sequence[int], query_lens: Sequence[int]) -> str:
    """`decode` when every sequence makes one token on top of a context, `prefill` when none does, else `mixed`."""
    decoding = sum(query == 1 and context > 0 for context, query in zip(contexts, query_lens, strict=True))
    if decoding == len(query_lens):
        return "decode"
    return "mixed" if decoding else "prefill"


def build_batch(
    tokens: torch.Tensor, *, contexts: Sequence[int], query_lens: Sequence[int], slots: Sequence[int]
) -> Batch:
    """A batch of `tokens` int64 [T], sequence after sequence; the other tensors are made on the same device."""
    starts = (0, *itertools.accumulate(query_lens))
    if tokens.shape != (starts[-1],):
        raise ValueError(f"{tuple(tokens.shape)} tokens for {starts[-1]} queries")
    positions = [
        context + offset for context, query in zip(contexts, query_lens, strict=True) for offset in range(query)
    ]
    device = tokens.device
    return Batch(
        tokens=tokens,
        positions=torch.tensor(positions, device=device),
        seq_starts=torch.tensor(starts, device=device),
        slots=torch.tensor(slots, device=device),
        phase=phase_of(contexts, query_lens),
        num_seqs=len(query_lens),
        query_tokens=starts[-1],
        context=max(contexts),
        host_seq_starts=starts,
        host_contexts=tuple(contexts),
        host_slots=tuple(slots),
    )
