"""What stands behind a slot of vLLM's tree: an instance of a part, its libraries, weights and context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from engines.decoder.source import CompiledPart, bound_params, failed, failed_by
from engines.vllm.step import Step
from hotpass.records.candidate import Candidate, Value
from hotpass.records.measurement import FailureKind

Forward = Callable[..., Any]


@dataclass(kw_only=True, slots=True)
class VllmContext:
    """What a part's `prepare` gets (`engines.protocol.PartContext`). vLLM's KV is reached through the kept `Attention`."""

    weights: Mapping[str, torch.Tensor]
    config: Any
    device: torch.device
    threads: int
    settings: Mapping[str, Value]
    native: Mapping[str, Any]
    slot: str
    layer: int | None
    kv: None
    """vLLM's pages belong to its attention layers; no part writes them but through those."""
    step: Step
    keeps: Mapping[str, torch.nn.Module]
    fallback: Forward

    def kept(self, name: str) -> Forward:
        """The child named in `keeps`; KeyError for another name."""
        return self.keeps[name]

    def reference(self) -> Forward:
        return self.fallback


def check_settings(candidate: Candidate) -> None:
    """Raises CandidateFailed for what vLLM takes at load only."""
    for name, value in candidate.settings.items():
        raise failed(FailureKind.INSTALL, f"setting {name}={value}: the vllm engine takes its arguments at load only")
    for name, degree in candidate.parallelism.items():
        if degree != 1:
            raise failed(FailureKind.INSTALL, f"parallelism {name}={degree}: the vllm engine runs with one rank")


def prepared(part: CompiledPart, context: VllmContext, undo: ExitStack) -> Forward:
    """The forward of a fresh instance, prepared; its close is on the stack."""
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


def libraries(part: CompiledPart, paths: Mapping[str, str]) -> dict[str, Any]:
    """Name → loaded library. Raises CandidateFailed."""
    missing = sorted(set(part.declared.native) - set(paths))
    if missing:
        raise failed(FailureKind.BUILD, f"part {part.name}: library {missing[0]} was not built")
    try:
        return {name: ctypes.CDLL(paths[name]) for name in part.declared.native}
    except OSError as error:
        raise failed_by(error, FailureKind.INSTALL, f"part {part.name}: a library does not load") from None


def derived_weights(
    part: CompiledPart, made: Mapping[str, Mapping[str, torch.Tensor]], slot: str
) -> Mapping[str, torch.Tensor]:
    if not part.has_weights:
        return {}
    if slot not in made:
        raise failed(FailureKind.BUILD, f"part {part.name}: the derived weights of {slot} are missing")
    return made[slot]
