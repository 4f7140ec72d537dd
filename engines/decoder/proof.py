"""The proof that trees compute and are what they were at birth: a probe of fixed tokens, and the structure of every tree.

    at birth   every window of layers answers the probe, by the probe's own tree and by the others in turn
    later      one tree and one window in turn, and all windows of trees whose structure changed ──► digests of the answers

A window is two neighbouring layers, the last norm and the head. One pass through one shows what became of the process (a patched
function, a flag, a library); what became of a tree, its structure shows each time, whole. So a proof costs a pass over the head and two
layers, not over all weights; after as many proofs as there are windows every layer has answered, and what a candidate did to answers of
the deployment as loaded, the windows that were timed beside it have shown bit for bit (`engines.judge.rounds`). Every layer answers
again in an attempt that is audited, and at every child's birth, as before a release. A tree with a cache of
its own answers through all layers at once. What is here judges nothing: it gives digests and names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from engines.decoder.batch import Batch, build_batch
from engines.decoder.fingerprint import logits_digest
from engines.decoder.own_cache import OwnCache
from engines.decoder.side import DecoderSide

PROBE_TOKENS = 5
PROBE_SLOTS = 2
PROBE_CONTEXT = 16
"""Positions of a slot of the probe's KV."""
LAYERS = 2
"""Of a window."""

Window = tuple[int, ...]
"""Layers that a pass goes through; none for all of them."""


class Proof:
    """Of one child. The probe is a side of its own, which nothing is ever installed on, with `PROBE_SLOTS` slots of KV."""

    def __init__(self, probe: DecoderSide, device: torch.device) -> None:
        self._probe = probe
        self._device = device
        self._windows = windows_of(len(probe.net.layer_paths)) if probe.net.ragged else ((),)
        self._made = 0

    def warm_up(self) -> None:
        """The context of the decode step, in the probe's second slot, and a first answer."""
        with torch.inference_mode():
            if self._probe.own is None and not self._probe.net.reason:
                tokens = torch.arange(1, PROBE_TOKENS + 1, device=self._device) % self._probe.vocab_size
                self._answered(self._probe, build_batch(tokens, contexts=[0], query_lens=[PROBE_TOKENS], slots=[1]), ())
            self._logits(self._probe, ())

    def changed(self, sides: Mapping[str, DecoderSide]) -> dict[str, DecoderSide]:
        """Those with nothing installed whose tree is not what it was at birth."""
        trees = {**sides, "probe": self._probe}
        return {name: side for name, side in trees.items() if side.installed is None and side.structure() != side.born}

    def digests(
        self, sides: Iterable[DecoderSide], changed: Iterable[DecoderSide], *, whole: bool = False
    ) -> dict[str, str]:
        """Of `whole`, every window. Window → SHA-256 of its logits; more than one, with spaces between, where trees that were asked do not agree."""
        trees = [side for side in [*sides, self._probe] if self._can_answer(side)]
        asked = self._next(trees) if self._made and not whole else self._first(trees)
        asked |= {(window, side) for side in changed if side in trees for window in self._windows}
        self._made += 1
        found: dict[Window, set[str]] = {}
        with torch.inference_mode():
            for window, side in asked:
                found.setdefault(window, set()).add(logits_digest(self._logits(side, window)))
        return {_name(window): " ".join(sorted(found[window])) for window in sorted(found)}

    def _first(self, trees: Sequence[DecoderSide]) -> set[tuple[Window, DecoderSide]]:
        """Every window by the probe's tree, and by another in turn; every tree at least once."""
        count = max(len(trees), len(self._windows))
        pairs = [(self._windows[i % len(self._windows)], trees[i % len(trees)]) for i in range(count)]
        return {*pairs, *((window, self._probe) for window in self._windows)}

    def _next(self, trees: Sequence[DecoderSide]) -> set[tuple[Window, DecoderSide]]:
        """Another tree each time; in the end every tree through every window."""
        rounds, place = divmod(self._made, len(self._windows))
        return {(self._windows[place], trees[(rounds + place) % len(trees)])}

    def _can_answer(self, side: DecoderSide) -> bool:
        return side.installed is None and side.name != "reference" and side.net.config is self._probe.net.config

    def _logits(self, side: DecoderSide, window: Window) -> list[torch.Tensor]:
        """A prompt, and beside it a decode step on a context that the probe's own KV has had since birth."""
        tokens = (torch.arange(1, PROBE_TOKENS + 2, device=self._device) * 37) % side.vocab_size
        if not side.net.reason:
            lengths = [PROBE_TOKENS, 1]
            batch = build_batch(tokens, contexts=[0, PROBE_TOKENS], query_lens=lengths, slots=[0, 1])
            return [self._answered(side, batch, window)]
        own = OwnCache(side.net.config, side.net.model, dtype=self._probe.kv.dtype, device=self._device, batched=False)
        prompt, then = tokens[:PROBE_TOKENS], tokens[PROBE_TOKENS:]
        return [
            own.forward(build_batch(prompt, contexts=[0], query_lens=[PROBE_TOKENS], slots=[0]), side.kv),
            own.forward(build_batch(then, contexts=[PROBE_TOKENS], query_lens=[1], slots=[0]), side.kv),
        ]

    def _answered(self, side: DecoderSide, batch: Batch, window: Window) -> torch.Tensor:
        """By the tree alone, on the probe's KV."""
        kv, side.step.kv = side.step.kv, self._probe.kv
        try:
            side.step.begin(batch)
            with side.net.only(window):
                return side.net.forward(batch, self._probe.kv)
        finally:
            side.step.kv = kv


def windows_of(num_layers: int) -> tuple[Window, ...]:
    """Neighbouring layers, each in at least one; all at once where that is as little."""
    if num_layers <= LAYERS:
        return ((),)
    starts = [*range(0, num_layers - LAYERS, LAYERS), num_layers - LAYERS]
    return tuple(tuple(range(start, start + LAYERS)) for start in starts)


def _name(window: Window) -> str:
    return f"layers {window[0]} to {window[-1]}" if window else "all layers"
