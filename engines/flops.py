"""A FLOP counter that knows the operators of a CPU too: torch's own misses its attention and its recurrent layers.

Two FLOPs a multiply-add, over the whole square of a causal attention, as torch counts them on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    """A context manager: `get_total_flops()`, and `get_flop_counts()` by module path."""
    return FlopCounterMode(display=False, custom_mapping=dict(_MISSING))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """[..., L, D], [..., S, D], [..., S, E]: L x S x (D + E) multiply-adds of each query head."""
    return int(2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _recurrent(inputs: Any, weight_ih: Any, weight_hh: Any, *_: Any, **__: Any) -> int:
    """inputs [T, B, in], weights of all gates: both products at every step of every sequence."""
    return int(2 * inputs[0] * inputs[1] * (prod(weight_ih) + prod(weight_hh)))


_MISSING: Mapping[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
}
