"""Attention of the reference over KV slots: registered with transformers as `hotpass`, so that its own modules run ragged batches.

    query, key, value of T tokens ──write──► (slot, position) of the pool ──attend, sequence by sequence──► [1, T, heads, head_dim]

Every sequence reads exactly the positions that it has, so a slot's unused positions may hold anything, NaN included. Dimensions:
T tokens, H query heads, K key-value heads, G = H / K, D head_dim, N sequences, L positions.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

from engines.decoder.batch import Batch
from engines.decoder.kv import KvPool

NAME = "hotpass"
MASK_BUCKET = 64
"""Positions are rounded up to this where a device-side mask stands for host-side lengths."""
SCATTER_FROM = 5
"""Sequences from which one scatter beats a slice copy for each (3 µs against 12 µs on a CPU, T4 of one layer)."""

_MEANINGLESS = {"position_ids", "use_cache", "cache_position", "is_causal", "output_attentions", "head_mask"}
"""Keyword arguments of attention functions that change nothing here."""


_handles = itertools.count()


class Unsupported(Exception):
    """The model asks of attention what full attention over slots does not do (windows, sinks, soft caps, biases)."""


class StepState:
    """The step now running on one side: what attention and module parts read. One object for the side's life."""

    def __init__(self, kv: KvPool) -> None:
        self.kv = kv
        self.batch: Batch | None = None
        self.serial = 0
        """Grows with every step, so that what depends on a step is computed once in it."""
        self.calls = 0
        """Attention calls since the last `begin`."""
        self.handle = next(_handles)
        """Its name for the compiled operator."""
        self.device_lengths = False
        """Read lengths from the batch's tensors only, never from its host-side copies: what a captured graph needs."""
        self._groups: list[tuple[int, int, int, int]] | None = None
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        _STEPS[self.handle] = self

    def bind_pool(self, model: torch.nn.Module) -> None:
        """Give attention modules their layer's tensors, which compiled code takes as inputs."""
        for module in model.modules():
            if "hotpass_step" in module.__dict__:
                layer: int = module.layer_idx  # type: ignore[assignment]
                module.__dict__["hotpass_keys"] = self.kv.keys(layer)
                module.__dict__["hotpass_values"] = self.kv.values(layer)

    def begin(self, batch: Batch) -> None:
        global _running
        _running = self.handle
        self.batch = batch
        self.serial += 1
        self.calls = 0
        self._groups = None
        self._masks.clear()

    def decode_groups(self) -> list[tuple[int, int, int, int]]:
        """(first sequence, sequences, first slot, length): neighbours in consecutive slots with equal lengths are one group."""
        if self._groups is None:
            assert self.batch is not None
            groups: list[tuple[int, int, int, int]] = []
            pairs = zip(self.batch.host_slots, self.batch.host_contexts, strict=True)
            for sequence, (slot, context) in enumerate(pairs):
                if groups and groups[-1][2] + groups[-1][1] == slot and groups[-1][3] == context + 1:
                    first, count, first_slot, length = groups[-1]
                    groups[-1] = (first, count + 1, first_slot, length)
                else:
                    groups.append((sequence, 1, slot, context + 1))
            self._groups = groups
        return self._groups

    def mask(self, query: int, context: int, like: torch.Tensor) -> torch.Tensor:
        """Additive [query, context + query]: query i sees the positions up to context + i. One for all layers of a step."""
        key = (query, context)
        if key not in self._masks:
            blocked = torch.ones(query, context + query, dtype=torch.bool, device=like.device).triu_(context + 1)
            empty = torch.zeros(query, context + query, dtype=like.dtype, device=like.device)
            self._masks[key] = empty.masked_fill_(blocked, float("-inf"))
        return self._masks[key]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    asked = sorted(name for name, value in kwargs.items() if value is not None and name not in _MEANINGLESS)
    if asked or attention_mask is not None or dropout:
        raise Unsupported(f"attention with {', '.join(asked) or 'a mask or dropout'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        keys, values = module.hotpass_keys, module.hotpass_values
        return torch.ops.hotpass.attend(query, key, value, keys, values, scale), None
    step: StepState = module.hotpass_step  # type: ignore[assignment]
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = step.kv.keys(layer), step.kv.values(layer)
    return attend_slots(query, key, value, keys, values, scale, step), None


def attend_slots(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    step: StepState,
) -> torch.Tensor:
    """Write this step's keys and values, then attend. Returns [1, T, H, D], contiguous."""
    batch = step.batch
    assert batch is not None
    step.calls += 1
    at_once = batch.phase == "decode" and (step.device_lengths or query.device.type != "cpu")
    _write(keys, key, batch, at_once)
    _write(values, value, batch, at_once)
    if at_once:
        return attend_decode_masked(query, keys, values, scale, batch)
    if batch.phase == "decode":
        return _attend_decode(query, keys, values, scale, step)
    return torch.cat(
        [_attend_sequence(query, keys, values, scale, step, index) for index in range(batch.num_seqs)], dim=1
    )


def attend_decode_masked(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, batch: Batch
) -> torch.Tensor:
    """Decode of all sequences at once, lengths read on the device: what a captured graph can replay with other positions.

    Reads `batch.context` positions rounded up to MASK_BUCKET; those beyond a sequence's own count as zero with weight zero.
    """
    length = min(-(-(batch.context + 1) // MASK_BUCKET) * MASK_BUCKET, keys.shape[2])
    valid_NL = torch.arange(length, device=query.device) <= batch.positions[:, None]
    hidden = ~valid_NL[:, None, :, None]
    keys_NKLD = keys[:, :, :length].index_select(0, batch.slots).masked_fill_(hidden, 0).to(query.dtype)
    values_NKLD = values[:, :, :length].index_select(0, batch.slots).masked_fill_(hidden, 0).to(query.dtype)
    query_NKGD = _grouped(query, keys.shape[1])
    out = sdpa(query_NKGD, keys_NKLD, values_NKLD, attn_mask=valid_NL[:, None, None, :], scale=scale)
    return out.reshape(1, batch.num_seqs, query.shape[1], query.shape[3])


def _write(pool: torch.Tensor, new: torch.Tensor, batch: Batch, at_once: bool) -> None:
    """new [1, K, T, D] to (slot, position) of pool [slots, K, max_context, D]."""
    if at_once or (batch.phase == "decode" and batch.num_seqs >= SCATTER_FROM):
        pool[batch.slots, :, batch.positions] = new[0].transpose(0, 1).to(pool.dtype)
        return
    bounds = itertools.pairwise(batch.host_seq_starts)
    for slot, context, (start, end) in zip(batch.host_slots, batch.host_contexts, bounds, strict=True):
        pool[slot, :, context : context + end - start] = new[0, :, start:end]


def _grouped(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[1, H, T, D] -> [T, K, G, D]: the queries that share a key-value head become rows of one small matrix."""
    return query[0].transpose(0, 1).reshape(query.shape[2], kv_heads, -1, query.shape[3])


def _attend_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, step: StepState
) -> torch.Tensor:
    query_NKGD = _grouped(query, keys.shape[1])
    parts = []
    for first, count, slot, length in step.decode_groups():
        keys_NKLD = keys[slot : slot + count, :, :length].to(query.dtype)
        values_NKLD = values[slot : slot + count, :, :length].to(query.dtype)
        parts.append(sdpa(query_NKGD[first : first + count], keys_NKLD, values_NKLD, scale=scale))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(1, query.shape[2], query.shape[1], query.shape[3])


def _attend_sequence(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, step: StepState, index: int
) -> torch.Tensor:
    batch = step.batch
    assert batch is not None
    start, end = batch.host_seq_starts[index], batch.host_seq_starts[index + 1]
    slot, context = batch.host_slots[index], batch.host_contexts[index]
    length = context + end - start
    keys_1KLD = keys[slot : slot + 1, :, :length].to(query.dtype)
    values_1KLD = values[slot : slot + 1, :, :length].to(query.dtype)
    query_1HQD = query[:, :, start:end]
    if end - start == 1:
        out = sdpa(_grouped(query_1HQD, keys.shape[1]), keys_1KLD, values_1KLD, scale=scale)
        return out.reshape(1, 1, query.shape[1], query.shape[3])
    shared = query.shape[1] != keys.shape[1]
    if context == 0:
        out = sdpa(query_1HQD, keys_1KLD, values_1KLD, is_causal=True, scale=scale, enable_gqa=shared)
    else:
        mask = step.mask(end - start, context, query)
        out = sdpa(query_1HQD, keys_1KLD, values_1KLD, attn_mask=mask, scale=scale, enable_gqa=shared)
    return out.transpose(1, 2)


_STEPS: weakref.WeakValueDictionary[int, StepState] = weakref.WeakValueDictionary()
"""Handle → step: how the compiled operator, which takes numbers and tensors only, finds its side."""
_running = -1
"""Handle of the step that began last. A handle in the graph would make the code of every side and cut another one, compiled anew."""


# The pool is written by the operator but not declared as mutated: nothing else in the graph reads it, and declaring it would make
# the compiler copy the pool wherever it cannot prove the same.
@torch.library.custom_op("hotpass::attend", mutates_args=())
def _attend_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return attend_slots(query, key, value, keys, values, scale, _STEPS[_running]).contiguous()


@_attend_op.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], query.shape[3]))


AttentionInterface.register(NAME, attend)
