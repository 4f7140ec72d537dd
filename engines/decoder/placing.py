"""From a part's text to its place in a tree, the same for every engine: checks, claims, context, dispatch.

    Candidate ──compiled──► parts ──claimed──► slots of each ──context──► prepare ──dispatcher──► forward, counted

What is not here: on which module a dispatcher is put and how it is taken off, which each engine does its own way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from engines.decoder.source import CompiledPart, bound_params, compile_part, failed, failed_by
from engines.program import Artefacts
from hotpass.parts import conflicts
from hotpass.records.candidate import Candidate, Value
from hotpass.records.measurement import FailureKind
from hotpass.records.slots import SlotTable, covered_slots

Forward = Callable[..., Any]

WHOLE_FORWARD = "forward"
"""What a slot stands for that holds no module's class: `model`, where it is an engine's own."""


@dataclass(kw_only=True, slots=True)
class Context:
    """What a part's `prepare` gets (`engines.protocol.PartContext`)."""

    weights: Mapping[str, torch.Tensor]
    config: Any
    device: torch.device
    threads: int
    settings: Mapping[str, Value]
    native: Mapping[str, Any]
    slot: str
    layer: int | None
    kv: Any
    """None in vLLM, whose pages belong to its attention layers: no part writes them but through those."""
    step: Any
    keeps: Mapping[str, torch.nn.Module]
    fallback: Forward

    def kept(self, name: str) -> Forward:
        """The child named in `keeps`; KeyError for another name."""
        return self.keeps[name]

    def reference(self) -> Forward:
        return self.fallback


def compiled(candidate: Candidate, engine: str, device: str, undo: ExitStack) -> list[CompiledPart]:
    """Every part's class, for this engine and device. Raises CandidateFailed; what is compiled is forgotten by `undo`."""
    parts = []
    for use in candidate.parts:
        part = compile_part(use)
        undo.callback(part.forget)
        if part.declared.engine != engine:
            raise failed(FailureKind.INSTALL, f"part {part.name} is for engine {part.declared.engine}, not {engine}")
        if part.declared.device not in ("any", device):
            raise failed(FailureKind.INSTALL, f"part {part.name} needs a {part.declared.device} device")
        parts.append(part)
    return parts


def claimed(parts: Sequence[CompiledPart], table: SlotTable) -> list[tuple[str, ...]]:
    """For each part the concrete slots that it claims. Raises CandidateFailed for conflicts and for claims of nothing."""
    found, covered = [], []
    for part in parts:
        wanted = part.declared.replaces
        slots = [slot for claim in part.declared.claims for slot in table.matching(claim, wanted)]
        if not slots:
            claims = list(part.declared.claims)
            raise failed(FailureKind.INSTALL, f"part {part.name} claims {claims}, which no slot here matches")
        for slot in slots:
            if wanted and slot.stands_for not in (wanted, WHOLE_FORWARD):
                kind = f"replaces {wanted}, but slot {slot.name} is a {slot.stands_for}"
                raise failed(FailureKind.INSTALL, f"part {part.name} {kind}")
        found.append(tuple(dict.fromkeys(slot.name for slot in slots)))
        covered.append(covered_slots(table, part.declared.claims, part.declared.keeps, wanted))
    for index, part in enumerate(parts):
        for other in range(index):
            shared = conflicts(parts[other].declared, covered[other], part.declared, covered[index])
            if shared:
                pair = f"parts {parts[other].name} and {part.name}"
                more = f"(and {len(shared) - 1} more slots)"
                raise failed(FailureKind.INSTALL, f"{pair} both cover {min(shared)} {more}")
    return found


def libraries(part: CompiledPart, artefacts: Artefacts, index: int) -> dict[str, Any]:
    """Name → loaded library of the candidate's part at `index`. Raises CandidateFailed."""
    paths = artefacts.native[index] if index < len(artefacts.native) else {}
    missing = sorted(set(part.declared.native) - set(paths))
    if missing:
        raise failed(FailureKind.BUILD, f"part {part.name}: library {missing[0]} was not built")
    try:
        return {name: ctypes.CDLL(paths[name]) for name in part.declared.native}
    except OSError as error:
        raise failed_by(error, FailureKind.INSTALL, f"part {part.name}: a library does not load") from None


def derived_weights(
    part: CompiledPart, artefacts: Artefacts, index: int, slot: str, device: torch.device
) -> Mapping[str, torch.Tensor]:
    """What the part's `weights` returned for a slot; {} for a part without. Raises CandidateFailed."""
    if not part.has_weights:
        return {}
    made = artefacts.derived[index] if index < len(artefacts.derived) else {}
    if slot not in made:
        raise failed(FailureKind.BUILD, f"part {part.name}: the derived weights of {slot} are missing")
    return {name: tensor.to(device) for name, tensor in made[slot].items()}


def kept_children(part: CompiledPart, slot: str, modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Name → module of each child that the part keeps. Raises CandidateFailed."""
    kept = {}
    for name in part.declared.keeps:
        if f"{slot}.{name}" not in modules:
            raise failed(FailureKind.INSTALL, f"part {part.name} keeps {name}, which {slot} has not")
        kept[name] = modules[f"{slot}.{name}"]
    return kept


def prepared(part: CompiledPart, context: Context, undo: ExitStack) -> Forward:
    """The forward of a fresh instance, prepared; its close is on the stack. Raises CandidateFailed."""
    params = bound_params(part.use, part.declared)
    try:
        with torch.inference_mode():
            instance = part.cls()
            if hasattr(instance, "prepare"):
                instance.prepare(context, params)
    except (Exception, SystemExit) as error:
        raise failed_by(error, FailureKind.INSTALL, f"part {part.name}: prepare fails at {context.slot}") from None
    if hasattr(instance, "close"):
        undo.callback(instance.close)
    forward: Forward = instance.forward
    return forward


def dispatcher(
    forward: Forward, fallback: Forward, serves: Callable[[], bool], counts: dict[str, int], slot: str
) -> Forward:
    """The part where its domain serves the step that runs, counted; else what stood there before."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if serves():
            counts[slot] += 1
            return forward(*args, **kwargs)
        return fallback(*args, **kwargs)

    return dispatch
