"""Attention over the KV slots in C++, with the projections left as they are."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from hotpass import part

TILE = 16
"""head_dim comes in multiples of this."""


@part(
    engine="decoder",
    claims=["model.layers.*.self_attn"],
    keeps=["q_proj", "k_proj", "v_proj", "o_proj"],
    replaces="LlamaAttention",
    numerics="tolerance",
    device="cpu",
    requires=["compiler"],
    native={"attention": "attention.cpp"},
)
class Attention:
    """One call rotates, writes the cache and attends, for any ragged step; keys and values are read once for all heads that share them.

    PyTorch repeats keys and values for the query heads of a group, makes some ten operator calls a layer, and goes sequence by sequence
    where lengths differ. Here positions of all sequences are one line, cut into equal shares for the threads, so that one long sequence
    with few KV heads keeps all of them busy; prompts take 16 queries at a time with a running softmax. It helps most in batches and at
    long contexts. It will not help at batch 1 with a short context, where the projections are nearly all of the time, and a whole-model
    part saves the calls as well. Keys and values are read in the cache's own type, everything else is float32.
    """

    def prepare(self, ctx: Any, params: Mapping[str, Any]) -> None:
        config, kv = ctx.config, ctx.kv
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if head_dim % TILE or heads // kv_heads > 64:
            raise ValueError(
                "cpp-attention needs head_dim in multiples of 16 and at most 64 query heads for each KV head"
            )
        if kv.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"cpp-attention reads float32 and bfloat16 KV caches, not {kv.dtype}")
        self._project = [ctx.kept(f"{name}_proj") for name in "qkv"]
        self._output = ctx.kept("o_proj")
        self._step, self._layer, self._kv = ctx.step, ctx.layer, kv
        self._out_shape = (heads * head_dim,)
        self._native = _OF_CACHE.setdefault(id(kv), _Native())
        self._native.take(ctx, heads, kv_heads, head_dim)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        batch = self._step.batch
        q, k, v = (project(hidden_states).float().contiguous() for project in self._project)
        cos, sin = (table.float().contiguous() for table in position_embeddings)
        out = torch.empty(*hidden_states.shape[:-1], *self._out_shape)
        step = _Batch(
            batch.tokens.data_ptr(), batch.positions.data_ptr(), batch.seq_starts.data_ptr(), batch.slots.data_ptr(),
            batch.num_seqs, batch.query_tokens,
        )  # fmt: skip
        self._native.run(self._layer, step, (q, k, v, cos, sin, out))
        return self._output(out.to(hidden_states.dtype)), None

    def close(self) -> None:
        if getattr(self, "_native", None) is not None and self._native.give_back():
            del _OF_CACHE[id(self._kv)]
        self._native = None


class _Native:
    """The C++ object that all layers of a side share, with its threads; it ends with the last of them."""

    def __init__(self) -> None:
        self._users = 0
        self._object: int | None = None

    def take(self, ctx: Any, heads: int, kv_heads: int, head_dim: int) -> None:
        """One more layer uses it. Raises MemoryError."""
        if not self._users:
            self._library = library = ctx.native["attention"]
            library.hp_attention_create.restype = ctypes.c_void_p
            library.hp_attention_create.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
            library.hp_attention_destroy.argtypes = [ctypes.c_void_p]
            library.hp_attention_destroy.restype = None
            library.hp_attention_layer.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 7]
            library.hp_attention_layer.restype = ctypes.c_int64
            shape = (ctypes.c_int64 * 4)(heads, kv_heads, head_dim, ctx.kv.max_context)
            cache, self._pointers = _cache(ctx.kv)
            self._object = library.hp_attention_create(shape, ctypes.byref(cache), ctx.threads)
            if not self._object:
                raise MemoryError("no memory or no threads for attention")
        self._users += 1

    def run(self, layer: int, batch: _Batch, tensors: tuple[torch.Tensor, ...]) -> None:
        """`tensors`: queries, keys, values, cosines, sines, out. Raises MemoryError."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self._library.hp_attention_layer(self._object, layer, ctypes.byref(batch), *pointers):
            raise MemoryError(f"no memory for a step of {batch.num_tokens} tokens")

    def give_back(self) -> bool:
        """True when nobody uses it any more, and it is gone."""
        self._users -= 1
        if not self._users:
            self._library.hp_attention_destroy(self._object)
        return not self._users


_OF_CACHE: dict[int, _Native] = {}
"""id of a KV cache → what serves it; a part's text is compiled anew for each install, so this is one side's."""


def _cache(kv: Any) -> tuple[_Cache, Any]:
    """The cache as C++ sees it, and the arrays that it points to. Raises ValueError for a layout that it cannot describe."""
    pairs = [(kv.keys(layer), kv.values(layer)) for layer in range(kv.num_layers)]
    strides = {tensor.stride() for pair in pairs for tensor in pair}
    if len(strides) != 1 or pairs[0][0].stride(-1) != 1:
        raise ValueError(
            f"cpp-attention needs all KV tensors in one layout with head_dim contiguous, not {sorted(strides)}"
        )
    arrays = [(ctypes.c_void_p * len(pairs))(*[pair[i].data_ptr() for pair in pairs]) for i in range(2)]
    addresses = [ctypes.cast(array, ctypes.c_void_p) for array in arrays]
    return _Cache(*addresses, *pairs[0][0].stride()[:3], int(kv.dtype == torch.bfloat16)), (arrays, kv)


class _Cache(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("slot_stride", "head_stride", "position_stride", "is_bf16")),
    )  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "seq_starts", "slots")),
        ("num_seqs", ctypes.c_int64), ("num_tokens", ctypes.c_int64),
    )  # fmt: skip
