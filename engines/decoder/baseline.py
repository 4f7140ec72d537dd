"""Baselines: transformers' own loop as a side, so that it is measured by the same windows as everything else.

Its own modules, its own cache, `logits_to_keep=1`, contexts computed by its own prefill, a row's sequences in one padded batch. A row
of decode and prefill together is two calls, since that loop has no mixed step. Only windows: serving has no batch of a fixed make-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engines.decoder.attention import StepState
from engines.decoder.compile import compile_in_this_thread
from engines.decoder.kv import KvPool
from engines.decoder.own_cache import OwnCache
from engines.decoder.reference import Net, build_net
from engines.decoder.side import DecoderSide
from engines.program import KvPlan
from hotpass.errors import InputError, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """One way to run transformers' loop."""

    attention: str
    """transformers' attention implementation."""
    dtype: str
    """What weights and activations are; weights of another dtype are converted once."""
    compiled: bool = False


_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
BASELINES: Mapping[str, Baseline] = {
    **{
        f"transformers-{attention}-{short}": Baseline(attention=attention, dtype=dtype)
        for attention in ("eager", "sdpa")
        for short, dtype in _DTYPES.items()
    },
    **{
        f"transformers-compiled-{short}": Baseline(attention="sdpa", dtype=dtype, compiled=True)
        for short, dtype in _DTYPES.items()
    },
}


def baseline_side(
    side: str,
    name: str,
    *,
    config: Any,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    plan: KvPlan,
    threads: int,
) -> DecoderSide:
    """A side that runs the baseline. Raises InputError for an unknown name."""
    if name not in BASELINES:
        raise InputError("baseline", name, "is not known", nearest(name, list(BASELINES)))
    baseline = BASELINES[name]
    dtype: torch.dtype = getattr(torch, baseline.dtype)
    model = build_net(config, weights, dtype=dtype, device=device, attention=baseline.attention)
    step = StepState(_no_kv(device))
    net = Net(config, model, step, f"{name} keeps its own cache")
    compiled = _compiled(model) if baseline.compiled else None
    own = OwnCache(config, model, dtype=dtype, device=device, batched=True, compiled=compiled)
    return DecoderSide(side, net, step.kv, plan, threads, own)


def _compiled(model: Any) -> Callable[..., Any]:
    """As transformers does it: the decode step only, over a static cache, shapes fixed (one graph for each row)."""
    compile_in_this_thread()
    compiled: Callable[..., Any] = torch.compile(model, dynamic=False)
    return compiled


def _no_kv(device: torch.device) -> KvPool:
    return KvPool(num_layers=0, num_slots=0, kv_heads=0, max_context=0, head_dim=0, dtype=torch.float32, device=device)
