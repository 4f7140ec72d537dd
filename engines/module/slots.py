"""The slot table of a module: `model`, and every module of its tree that has a forward of its own.

`model` is the whole module. A child of it at the path `model` is no slot of its own, since that name is taken; what lies below is.
"""

from __future__ import annotations

from typing import Any

import torch

from engines.decoder.slots import WHOLE, class_source, described
from engines.starting import REFERENCE, starting_part, with_reference
from hotpass.canonical import bytes_hash
from hotpass.errors import InputError, nearest
from hotpass.records.measurement import Tier
from hotpass.records.slots import Slot, SlotTable

_NO_SLOT = (
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
    torch.jit.ScriptModule,
)


def slot_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Slot → module, in tree order; `model` is the root. What has no forward of its own is none."""
    found = {WHOLE: model}
    for path, module in model.named_modules():
        has_forward = type(module).forward is not torch.nn.Module.forward
        if path not in ("", WHOLE) and has_forward and not isinstance(module, _NO_SLOT):
            found[path] = module
    return found


def slot_table(model: torch.nn.Module) -> SlotTable:
    """All slots. The fast tier can judge each: it runs the whole module."""
    slots = []
    for name, module in slot_modules(model).items():
        signature, digest = _described(_kind(module))
        slots.append(
            Slot(
                name=name,
                stands_for="forward" if name == WHOLE else type(module).__name__,
                signature=signature,
                reference_sha256=digest,
                lowest_tier=Tier.FAST,
            )
        )
    return SlotTable(
        engine="module", version=f"module/1 torch {torch.__version__} {type(model).__name__}", slots=tuple(slots)
    )


def reference_source(model: torch.nn.Module, slot: str) -> str:
    """Source of the class at a slot; of `model`, of every class that is not torch's own. Raises InputError for an unknown slot."""
    modules = _known(model, slot)
    if slot != WHOLE:
        return class_source(_kind(modules[slot]))
    kinds = dict.fromkeys(_kind(module) for module in model.modules())
    return "\n\n".join(class_source(kind) for kind in kinds if not kind.__module__.startswith("torch."))


def part_template(model: torch.nn.Module, slot: str) -> str:
    """A runnable part that calls the reference, with the reference's source below it to replace it with."""
    module = _known(model, slot)[slot]
    stands_for = "" if slot == WHOLE else type(module).__name__
    text = starting_part(slot, REFERENCE, engine="module", stands_for=stands_for)
    return with_reference(text, class_source(_kind(module)), _described(_kind(module))[0])


def _kind(module: torch.nn.Module) -> Any:
    return type(module)


def _described(kind: Any) -> tuple[str, str]:
    try:
        return described(kind)
    except (ValueError, TypeError):  # a forward without a signature
        return "(*args, **kwargs)", bytes_hash(class_source(kind).encode())


def _known(model: torch.nn.Module, slot: str) -> dict[str, torch.nn.Module]:
    modules = slot_modules(model)
    if slot not in modules:
        raise InputError("slot", slot, "is not in the slot table", nearest(slot, list(modules))[:300])
    return modules
