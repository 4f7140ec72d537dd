"""The KV cache of one side: for each layer, keys and values of a fixed number of slots.

    keys(layer), values(layer): [slots, kv_heads, max_context, head_dim]      entry (slot, position) belongs to one token

Memory is taken as it is touched (zero pages on a CPU). Nothing here says which positions are valid: that is the batch's.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch


class KvPool:
    """Storage of one side (`engines.protocol.KvView`); addresses and strides are fixed for its life."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        kv_heads: int,
        max_context: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers = num_layers
        self.num_slots = num_slots
        self.max_context = max_context
        self.dtype = dtype
        self.device = device
        shape = (num_slots, kv_heads, max_context, head_dim)
        with torch.inference_mode(False):
            self._keys = [_zeros(shape, dtype, device) for _ in range(num_layers)]
            self._values = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    def keys(self, layer: int) -> torch.Tensor:
        """[num_slots, kv_heads, max_context, head_dim], rotary already applied."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        return self._values[layer]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys of every layer, then values."""
        return (*self._keys, *self._values)

    @property
    def geometry(self) -> tuple[object, ...]:
        """Pools that are alike in it can hold each other's contents byte for byte."""
        return (self.dtype, str(self.device), *(tensor.shape for tensor in self.tensors()))

    def memory(self) -> tuple[object, ...]:
        """What the pool is made of: type and address of every tensor. The same for its life."""
        return tuple((tensor.dtype, tensor.data_ptr()) for tensor in self.tensors())

    def poison(self, slots: Sequence[int]) -> None:
        """NaN in whole slots: what nobody may read any more."""
        for tensor in self.tensors():
            for slot in slots:
                tensor[slot].fill_(float("nan"))

    def read(self, slot: int, length: int) -> torch.Tensor:
        """A copy of the first positions: float32 [layers, 2, kv_heads, length, head_dim]."""
        pairs = [
            torch.stack([keys[slot, :, :length], values[slot, :, :length]])
            for keys, values in zip(self._keys, self._values, strict=True)
        ]
        return torch.stack(pairs).float()

    def write(self, slot: int, context: torch.Tensor) -> None:
        """The inverse of `read`: positions [0, length) of a slot, rounded to the pool's dtype."""
        length = context.shape[3]
        for layer in range(self.num_layers):
            self._keys[layer][slot, :, :length].copy_(context[layer, 0])
            self._values[layer][slot, :, :length].copy_(context[layer, 1])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU from pages that become real as they are written (torch.zeros writes them all): most slots are short."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
