"""The decoder's slot table: `model`, and every module of the tree that has a forward.

Containers have none, and dropout does nothing when serving. The base model of a Llama-like tree sits at the path `model`, which is
the name of the whole forward here; it is no slot of its own.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import transformers

from engines.decoder.reference import Net
from hotpass.canonical import bytes_hash
from hotpass.records.measurement import Tier
from hotpass.records.slots import Slot, SlotTable

WHOLE = "model"
WHOLE_SIGNATURE = "(batch, kv) -> logits [num_seqs, vocab]"
_NO_SLOT = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential, torch.nn.Dropout)


def slot_modules(net: Net) -> dict[str, torch.nn.Module]:
    """Slot name → module, in tree order, without `model`."""
    return {
        name: module
        for name, module in net.modules.items()
        if name and name != WHOLE and not isinstance(module, _NO_SLOT)
    }


def slot_table(net: Net) -> SlotTable:
    """All slots of one tree. The fast tier can judge each: none needs another request than the one it runs on."""
    slots = [
        Slot(
            name=WHOLE,
            stands_for="forward",
            signature=WHOLE_SIGNATURE,
            reference_sha256=bytes_hash(reference_source(net, WHOLE).encode()),
            lowest_tier=Tier.FAST,
        )
    ]
    for name, module in slot_modules(net).items():
        kind: Any = type(module)
        signature, digest = described(kind)
        slots.append(
            Slot(
                name=name,
                stands_for=type(module).__name__,
                signature=signature,
                reference_sha256=digest,
                lowest_tier=Tier.FAST,
            )
        )
    return SlotTable(engine="decoder", version=table_version(net), slots=tuple(slots))


def table_version(net: Net) -> str:
    """Engine kind, library version, architecture; and, for a tree with its own cache, that and why."""
    architecture = type(net.model).__name__
    kind = "ragged" if net.ragged else f"one request per cache ({net.reason})"
    return f"decoder/1 transformers {transformers.__version__} {architecture} {kind}"


def reference_source(net: Net, slot: str) -> str:
    """Source of the class that a slot stands for; of `model`, the classes of the causal LM, its base and its layers' kinds."""
    if slot != WHOLE:
        stands_for: Any = type(slot_modules(net)[slot])
        return class_source(stands_for)
    kinds: dict[Any, None] = {}
    for module in net.modules.values():
        if type(module).__module__.startswith("transformers.models."):
            kinds[type(module)] = None
    return "\n\n".join(class_source(kind) for kind in kinds)


@functools.cache
def described(kind: Any) -> tuple[str, str]:
    """Signature of a class's forward, and the hash of its source."""
    forward: Any = kind.forward
    signature = inspect.signature(forward)
    own = signature.replace(parameters=[p for name, p in signature.parameters.items() if name != "self"])
    return str(own), bytes_hash(class_source(kind).encode())


@functools.cache
def class_source(kind: Any) -> str:
    """Text of a class, or a comment that it has none."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return f"# {kind.__module__}.{kind.__qualname__} has no Python source\n"
