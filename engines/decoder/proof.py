"""The proof that trees compute and are what they were at birth: a probe of fixed tokens, and the structure of every tree.

    at birth   every tree answers the probe
    later      one tree in turn, and those whose structure changed ──► digest of the answers; names of the changed trees

One pass shows what became of the process (a patched function, a flag, a library); what became of a tree, its structure shows each
time. So a proof costs one pass over the weights, and not one a tree. What is here judges nothing: it gives digests and names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from engines.decoder.batch import Batch, build_batch
from engines.decoder.fingerprint import logits_digest
from engines.decoder.own_cache import OwnCache
from engines.decoder.side import DecoderSide

PROBE_TOKENS = 5
PROBE_SLOTS = 2
PROBE_CONTEXT = 16
"""Positions of a slot of the probe's KV."""


class Proof:
    """Of one child. The probe is a side of its own, which nothing is ever installed on, with `PROBE_SLOTS` slots of KV."""

    def __init__(self, probe: DecoderSide, device: torch.device) -> None:
        self._probe = probe
        self._device = device
        self._made = 0

    def warm_up(self) -> None:
        """The context of the decode step, in the probe's second slot, and a first answer."""
        with torch.inference_mode():
            if self._probe.own is None and not self._probe.net.reason:
                tokens = torch.arange(1, PROBE_TOKENS + 1, device=self._device) % self._probe.vocab_size
                self._answered(self._probe, build_batch(tokens, contexts=[0], query_lens=[PROBE_TOKENS], slots=[1]))
            self._logits(self._probe)

    def changed(self, sides: Mapping[str, DecoderSide]) -> dict[str, DecoderSide]:
        """Those with nothing installed whose tree is not what it was at birth."""
        trees = {**sides, "probe": self._probe}
        return {name: side for name, side in trees.items() if side.installed is None and side.structure() != side.born}

    def digests(self, sides: Iterable[DecoderSide], changed: Iterable[DecoderSide]) -> list[str]:
        """Different answers of the trees that are asked this time; one where all is as at birth."""
        trees = [side for side in [*sides, self._probe] if self._can_answer(side)]
        asked = trees
        if self._made:
            turn = trees[self._made % len(trees)]
            asked = [turn, *(side for side in changed if side in trees and side is not turn)]
        self._made += 1
        with torch.inference_mode():
            return sorted({logits_digest(self._logits(side)) for side in asked})

    def _can_answer(self, side: DecoderSide) -> bool:
        return side.installed is None and side.name != "reference" and side.net.config is self._probe.net.config

    def _logits(self, side: DecoderSide) -> list[torch.Tensor]:
        """A prompt, and beside it a decode step on a context that the probe's own KV has had since birth."""
        tokens = (torch.arange(1, PROBE_TOKENS + 2, device=self._device) * 37) % side.vocab_size
        if not side.net.reason:
            lengths = [PROBE_TOKENS, 1]
            batch = build_batch(tokens, contexts=[0, PROBE_TOKENS], query_lens=lengths, slots=[0, 1])
            return [self._answered(side, batch)]
        own = OwnCache(side.net.config, side.net.model, dtype=self._probe.kv.dtype, device=self._device, batched=False)
        prompt, then = tokens[:PROBE_TOKENS], tokens[PROBE_TOKENS:]
        return [
            own.forward(build_batch(prompt, contexts=[0], query_lens=[PROBE_TOKENS], slots=[0]), side.kv),
            own.forward(build_batch(then, contexts=[PROBE_TOKENS], query_lens=[1], slots=[0]), side.kv),
        ]

    def _answered(self, side: DecoderSide, batch: Batch) -> torch.Tensor:
        """By the tree alone, on the probe's KV."""
        kv, side.step.kv = side.step.kv, self._probe.kv
        try:
            side.step.begin(batch)
            return side.net.forward(batch, self._probe.kv)
        finally:
            side.step.kv = kv
