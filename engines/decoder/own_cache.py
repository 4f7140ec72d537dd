"""Running a tree with transformers' own cache: models that are not plain full attention, and transformers' loop as a baseline.

    a batch ──► groups of sequences that share one DynamicCache (a row's, padded on the left) ──► one call each ──► logits
            └─► sequences without a group: one request per cache, one call each

Groups exist where contexts were loaded for a shape row and the tree takes padding; a group is one call of transformers' own batched
loop, with `logits_to_keep=1`. Windows go back to the loaded context: by cropping the cache, or from a copy where it cannot be cropped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from engines.decoder.batch import Batch
from engines.decoder.kv import KvPool

STATIC_BUCKET = 64
"""Positions of a static cache are rounded up to this."""


class CachedGroup:
    """Sequences that one cache holds, padded on the left to the longest context."""

    def __init__(self, config: Any, slots: Sequence[int], device: torch.device, positions: int = 0) -> None:
        """`positions`: make a static cache of so many, which a compiled step needs; 0 makes one that grows."""
        self.slots = tuple(slots)
        self.device = device
        self.lengths: tuple[int, ...] = (0,) * len(slots)
        """Context of each sequence without padding, as loaded."""
        self.positions = positions
        self.cache: Any = StaticCache(config, max_cache_len=positions) if positions else DynamicCache(config=config)
        self._loaded: Any = None
        """A copy of the cache as loaded, where cropping cannot bring it back."""

    @property
    def padded(self) -> int:
        """Cache positions of the loaded contexts."""
        return max(self.lengths)

    def prefill(self, model: Callable[..., Any], contexts: Sequence[torch.Tensor]) -> None:
        """Contexts as token ids: computed by the tree's own prefill."""
        self._start(contexts)
        if self.padded:
            padded = [torch.nn.functional.pad(tokens, (self.padded - len(tokens), 0)) for tokens in contexts]
            self.call(model, torch.stack(padded).to(self.device), (0,) * len(self.slots), offset=0)
        self._keep()

    def fill(self, contexts: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        """Contexts as KV [layers, 2, kv_heads, length, head_dim]: rounded to the tree's dtype."""
        self._start([context.movedim(3, 0) for context in contexts])
        if self.padded:
            padded = [torch.nn.functional.pad(kv, (0, 0, self.padded - kv.shape[3], 0)) for kv in contexts]
            stacked = torch.stack(padded).to(device=self.device, dtype=dtype)
            for layer in range(stacked.shape[1]):
                self.cache.update(stacked[:, layer, 0], stacked[:, layer, 1], layer)
        self._keep()

    def call(
        self, model: Callable[..., Any], tokens: torch.Tensor, contexts: Sequence[int], *, offset: int | None = None
    ) -> torch.Tensor:
        """One call of the tree with tokens [n, query]; logits [n, vocab] of the last. `contexts` without padding.

        `offset` is the cache position where the tokens go; by default after the contexts, where the cache is brought back to.
        """
        query = tokens.shape[1]
        if offset is None:
            offset = self.padded + contexts[0] - self.lengths[0]
            self._rewind(offset)
        pads = [self.padded - length for length in self.lengths]
        options: dict[str, Any] = {}
        if any(pads):
            columns = torch.arange(self.positions or offset + query, device=self.device)
            starts = torch.tensor(pads, device=self.device)[:, None]
            options["attention_mask"] = (columns >= starts).long()  # what lies ahead is causally masked
            options["position_ids"] = (columns[offset : offset + query] - starts).clamp_(min=0)
        out = model(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **options)
        return out.logits[:, -1]  # type: ignore[no-any-return]

    @property
    def length(self) -> int:
        return int(self.cache.get_seq_length())

    def _start(self, contexts: Sequence[torch.Tensor]) -> None:
        self.lengths = tuple(len(context) for context in contexts)

    def _keep(self) -> None:
        if not self.positions and not all(
            type(layer) is DynamicLayer for layer in self.cache.layers
        ):  # windows and states forget
            self._loaded = copy.deepcopy(self.cache)

    def _rewind(self, length: int) -> None:
        if self.length == length:
            return
        if self.positions:
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(length)
        elif self._loaded is not None and length == self.padded:
            self.cache = copy.deepcopy(self._loaded)
        elif self._loaded is None and self.length > length:
            self.cache.crop(length - self.length)
        else:
            raise ValueError(f"the cache holds {self.length} positions and cannot go to {length}")


class OwnCache:
    """The forward of a tree over caches of transformers' own."""

    def __init__(
        self,
        config: Any,
        model: Callable[..., Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
        batched: bool,
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        """`batched`: a row's sequences share a cache, as in transformers' batched loop. `compiled`: the same model for the
        decode steps of rows, whose caches are static then; it compiles as it meets them."""
        self.compiled = compiled
        self._config = config
        self._model = model
        self._dtype = dtype
        self._device = device
        self._batched = batched
        self._groups: dict[tuple[int, ...], CachedGroup] = {}

    def load_contexts(
        self, slots: Sequence[int], query_lens: Sequence[int], steps: int, contexts: Sequence[torch.Tensor]
    ) -> None:
        """A row's contexts: token ids (int64, one dimension), or KV as `KvPool.read` gives it. `steps`: of its windows."""
        for members in self._members(query_lens):
            mine = [contexts[index] for index in members]
            positions = 0
            if self.compiled is not None and query_lens[members[0]] == 1:
                longest = max(context.shape[0 if context.ndim == 1 else 3] for context in mine)
                positions = -(-(longest + steps) // STATIC_BUCKET) * STATIC_BUCKET
            group = CachedGroup(self._config, [slots[index] for index in members], self._device, positions)
            with torch.inference_mode():
                if mine[0].ndim == 1:
                    group.prefill(self._model, mine)
                else:
                    group.fill(mine, self._dtype)
            self._groups[group.slots] = group

    def forward(self, batch: Batch, kv: KvPool) -> torch.Tensor:
        """Logits float32 [num_seqs, vocab]; `kv` is not used."""
        query_lens = [batch.query_len(index) for index in range(batch.num_seqs)]
        rows: list[torch.Tensor | None] = [None] * batch.num_seqs
        for members in self._known(batch, query_lens):
            tokens = torch.stack([_tokens(batch, index) for index in members])
            group = self._group(batch, members)
            model = self.compiled if self.compiled is not None and group.positions else self._model
            logits = group.call(model, tokens, [batch.host_contexts[index] for index in members])
            for row, index in enumerate(members):
                rows[index] = logits[row]
        return torch.stack([row for row in rows if row is not None]).float()

    def drop(self, slot: int) -> None:
        """Forget a request's own cache."""
        self._groups.pop((slot,), None)

    def _members(self, query_lens: Sequence[int]) -> list[list[int]]:
        """Which sequences share a cache: those with equally many tokens a step, or each alone."""
        if not self._batched:
            return [[index] for index in range(len(query_lens))]
        kinds: dict[int, list[int]] = {}
        for index, query in enumerate(query_lens):
            kinds.setdefault(query, []).append(index)
        return list(kinds.values())

    def _known(self, batch: Batch, query_lens: Sequence[int]) -> list[list[int]]:
        """Groups of this batch that have a shared cache; each of the other sequences alone."""
        groups: list[list[int]] = []
        for members in self._members(query_lens):
            together = tuple(batch.host_slots[index] for index in members) in self._groups
            groups += [members] if together else [[index] for index in members]
        return groups

    def _group(self, batch: Batch, members: Sequence[int]) -> CachedGroup:
        slots = tuple(batch.host_slots[index] for index in members)
        fresh = len(members) == 1 and batch.host_contexts[members[0]] == 0
        if slots not in self._groups or (fresh and self._groups[slots].lengths == (0,)):
            if not fresh:
                raise ValueError(f"slot {slots[0]} has a context that was never computed or loaded")
            self._groups[slots] = CachedGroup(self._config, slots, batch.tokens.device)
        return self._groups[slots]


def _tokens(batch: Batch, index: int) -> torch.Tensor:
    return batch.tokens[batch.host_seq_starts[index] : batch.host_seq_starts[index + 1]]
