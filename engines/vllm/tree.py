"""vLLM's module tree with parts on it: which slots there are, and what runs at them on which side.

    install(side, candidate) ──► instances behind dispatchers, kept aside      activate(side) ──► that side's dispatchers on the modules

There is one tree and one set of weights, so at most one side's parts are on it at any time: while the incumbent runs, nothing of the
candidate is there. Runs inside vLLM's worker; knows the step only by vLLM's own attention metadata. Settings of hotpass are refused.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from engines.decoder.source import CompiledPart, compile_part, failed, failed_by
from engines.prepare.store import layer_of
from engines.vllm.compiled import CompiledStates, Opaque
from engines.vllm.parts import Forward, VllmContext, check_settings, derived_weights, libraries, prepared
from engines.vllm.step import Step
from hotpass.canonical import bytes_hash
from hotpass.domain import Domain
from hotpass.parts import conflicts
from hotpass.records.candidate import Candidate, Reload
from hotpass.records.measurement import FailureKind, ReloadReport, Side, Tier
from hotpass.records.slots import Slot, SlotTable, covered_slots

NO_SLOT = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential, torch.nn.Dropout)


@dataclass(kw_only=True, slots=True)
class Installed:
    """A candidate on a side, ready to be activated."""

    candidate: Candidate
    forwards: dict[str, Forward] = field(default_factory=dict)
    """Slot → dispatcher."""
    counts: dict[str, int] = field(default_factory=dict)
    """Claimed slot → calls of a part since the last reset."""
    undo: ExitStack = field(default_factory=ExitStack)
    opaque: dict[str, Opaque] = field(default_factory=dict)
    """Slot → its dispatcher as the compiler meets it; empty under eager."""


class Tree:
    """Parts on one model of vLLM."""

    def __init__(self, root: torch.nn.Module, config: Any, version: str, threads: int) -> None:
        self.root = root
        self.modules = {name: m for name, m in root.named_modules() if name and not isinstance(m, NO_SLOT)}
        self.step = Step()
        self.active = ""
        """Side whose parts are on the modules; empty for none."""
        self._config, self._version, self._threads = config, version, threads
        self._sides: dict[str, Installed] = {}
        self._table: SlotTable | None = None
        self.compiled = CompiledStates(root)
        self.born = self.structure()

    def slots(self) -> SlotTable:
        if self._table is None:
            slots = tuple(_slot(name, module) for name, module in self.modules.items())
            architecture = type(self.root).__name__
            self._table = SlotTable(engine="vllm", version=f"vllm/1 {self._version} {architecture}", slots=slots)
        return self._table

    def source(self, slot: str) -> str:
        """Source of the class that a slot stands for; KeyError for a name that is none."""
        return _source(type(self.modules[slot]))

    def install(
        self,
        side: str,
        candidate: Candidate,
        native: Sequence[Mapping[str, str]],
        derived: Sequence[Mapping[str, Mapping[str, torch.Tensor]]],
    ) -> ReloadReport:
        """In place of what the side had. Raises CandidateFailed, with the side as loaded."""
        self.uninstall(side)
        installed = Installed(candidate=candidate)
        phases: dict[str, float] = {}
        try:
            start = time.perf_counter()
            check_settings(candidate)
            parts = self._compiled(candidate, installed.undo)
            claimed = self._claimed(parts)
            phases["source"] = (time.perf_counter() - start) * 1e3
            start = time.perf_counter()
            derived_bytes = self._place(installed, parts, claimed, native, derived)
            phases["prepare"] = (time.perf_counter() - start) * 1e3
        except (Exception, SystemExit) as error:
            with suppress(Exception):  # of two errors the first is the one to tell
                installed.undo.close()
            raise failed_by(error, FailureKind.INSTALL, "the install fails") from None
        if self.compiled.compiles:
            installed.opaque = {slot: Opaque(slot, forward) for slot, forward in installed.forwards.items()}
            for item in installed.opaque.values():
                installed.undo.callback(item.forget)
        self._sides[side] = installed
        declared = max((part.declared.reload for part in parts), key=lambda kind: kind.rank, default=Reload.HOT)
        return ReloadReport(
            candidate_id=candidate.id,
            side=Side(side),
            declared=declared,
            actual=Reload.REWEIGHT if derived_bytes else Reload.RECAPTURE if self.compiled.compiles else Reload.HOT,
            phases_ms=phases,
            slots=tuple(sorted(installed.counts)),
            derived_bytes=derived_bytes,
        )

    def uninstall(self, side: str) -> None:
        """The side as loaded. Restores everything even when a part's close raises; then that is raised."""
        if self.active == side:
            self.activate("")
        self.compiled.clear(side)
        installed = self._sides.pop(side, None)
        if installed is not None:
            installed.undo.close()

    def activate(self, side: str) -> None:
        """Put a side's parts, and nothing else, onto the modules; "" takes all off."""
        if side == self.active:
            return
        for name in self._forwards(self.active):
            self.modules[name].__dict__.pop("forward", None)
        self._put_on(self._forwards(side))
        self.compiled.select(side)
        self.active = side

    def learn(self, side: str) -> None:
        """The side's parts for one eager step, which shows what each takes and gives."""
        self.activate("")
        self.compiled.dry(True)
        self._put_on({slot: item.learn for slot, item in self._sides[side].opaque.items()})
        self.active = side

    def recapture(self, side: str) -> None:
        """After `learn` and a step: the next step compiles the side, with its parts as operators. Raises CandidateFailed."""
        installed = self._sides[side]
        self.activate("")
        self.compiled.dry(False)
        installed.forwards = {slot: item.forward() for slot, item in installed.opaque.items()}
        self._put_on(installed.forwards)
        self.compiled.begin()
        self.active = side

    def recaptured(self, side: str) -> None:
        """The steps since `recapture` have compiled the side. Raises CandidateFailed when they called no part at some slot."""
        silent = [slot for slot, calls in self.counts(side).items() if not calls]
        if silent:
            raise failed(FailureKind.INSTALL, f"the compiled forward does not call the part at {silent[0]}")
        self.compiled.keep(side)

    def _put_on(self, forwards: Mapping[str, Forward]) -> None:
        for name, forward in forwards.items():
            self.modules[name].__dict__["forward"] = forward

    def candidate_of(self, side: str) -> str:
        """Id of what is installed on a side; empty for as loaded."""
        return self._sides[side].candidate.id if side in self._sides else ""

    def reset_counts(self, side: str) -> None:
        counts = self._sides[side].counts if side in self._sides else {}
        for slot in counts:
            counts[slot] = 0

    def counts(self, side: str) -> dict[str, int]:
        return dict(self._sides[side].counts) if side in self._sides else {}

    def structure(self) -> str:
        """Digest of what the tree is made of when no side is active: classes, instance forwards, hooks, where its weights lie."""
        facts = [
            (id(type(module)), "forward" in module.__dict__, len(module._forward_hooks), len(module._forward_pre_hooks))
            for module in self.root.modules()
        ]
        weights = [parameter.data_ptr() for parameter in self.root.parameters()]
        return bytes_hash(repr([facts, weights, self.root.training]).encode())

    def _forwards(self, side: str) -> dict[str, Forward]:
        return self._sides[side].forwards if side in self._sides else {}

    def _compiled(self, candidate: Candidate, undo: ExitStack) -> list[CompiledPart]:
        parts = []
        for use in candidate.parts:
            part = compile_part(use)
            undo.callback(part.forget)
            if part.declared.engine != "vllm":
                raise failed(FailureKind.INSTALL, f"part {part.name} is for engine {part.declared.engine}, not vllm")
            if part.declared.device not in ("any", "cpu"):
                raise failed(FailureKind.INSTALL, f"part {part.name} needs a {part.declared.device} device")
            parts.append(part)
        return parts

    def _claimed(self, parts: Sequence[CompiledPart]) -> list[tuple[str, ...]]:
        """For each part the concrete slots that it claims. Raises CandidateFailed for conflicts and for claims of nothing."""
        table = self.slots()
        claimed, covered = [], []
        for part in parts:
            found = [slot for claim in part.declared.claims for slot in table.matching(claim)]
            if not found:
                claims = list(part.declared.claims)
                raise failed(FailureKind.INSTALL, f"part {part.name} claims {claims}, which no slot here matches")
            for slot in found:
                if part.declared.replaces not in ("", slot.stands_for):
                    kind = f"replaces {part.declared.replaces}, but slot {slot.name} is a {slot.stands_for}"
                    raise failed(FailureKind.INSTALL, f"part {part.name} {kind}")
            claimed.append(tuple(dict.fromkeys(slot.name for slot in found)))
            covered.append(covered_slots(table, part.declared.claims, part.declared.keeps))
        for index, part in enumerate(parts):
            for other in range(index):
                shared = conflicts(parts[other].declared, covered[other], part.declared, covered[index])
                if shared:
                    pair = f"parts {parts[other].name} and {part.name}"
                    raise failed(FailureKind.INSTALL, f"{pair} both cover {min(shared)} (and {len(shared) - 1} more)")
        return claimed

    def _place(
        self,
        installed: Installed,
        parts: Sequence[CompiledPart],
        claimed: Sequence[tuple[str, ...]],
        native: Sequence[Mapping[str, str]],
        derived: Sequence[Mapping[str, Mapping[str, torch.Tensor]]],
    ) -> int:
        """An instance of its part for every claimed slot, prepared. Returns bytes of derived weights."""
        total = 0
        for index, (part, slots) in enumerate(zip(parts, claimed, strict=True)):
            loaded = libraries(part, native[index] if index < len(native) else {})
            made = derived[index] if index < len(derived) else {}
            domain = part.declared.parsed_domain
            for slot in slots:
                weights = derived_weights(part, made, slot)
                total += sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
                fallback = installed.forwards.get(slot) or self.modules[slot].forward
                context = VllmContext(
                    weights=weights,
                    config=self._config,
                    device=torch.device("cpu"),
                    threads=self._threads,
                    settings={},
                    native=loaded,
                    slot=slot,
                    layer=layer_of(slot),
                    kv=None,
                    step=self.step,
                    keeps=self._kept(part, slot),
                    fallback=fallback,
                )
                forward = prepared(part, context, installed.undo)
                installed.counts[slot] = 0
                dispatch = _dispatcher(forward, fallback, domain, self.step, installed.counts, slot)
                installed.forwards[slot] = dispatch
        return total

    def _kept(self, part: CompiledPart, slot: str) -> dict[str, torch.nn.Module]:
        kept = {}
        for name in part.declared.keeps:
            if f"{slot}.{name}" not in self.modules:
                raise failed(FailureKind.INSTALL, f"part {part.name} keeps {name}, which {slot} has not")
            kept[name] = self.modules[f"{slot}.{name}"]
        return kept


def _dispatcher(
    forward: Forward, fallback: Forward, domain: Domain, step: Step, counts: dict[str, int], slot: str
) -> Forward:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if step.within(domain):
            counts[slot] += 1
            return forward(*args, **kwargs)
        return fallback(*args, **kwargs)

    return dispatch


def _slot(name: str, module: torch.nn.Module) -> Slot:
    kind: Any = type(module)
    signature, digest = _described(kind)
    return Slot(
        name=name, stands_for=kind.__name__, signature=signature, reference_sha256=digest, lowest_tier=Tier.FAST
    )


@cache
def _described(kind: Any) -> tuple[str, str]:
    signature = inspect.signature(kind.forward)
    own = signature.replace(parameters=[p for name, p in signature.parameters.items() if name != "self"])
    return str(own), bytes_hash(_source(kind).encode())


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return f"# {kind.__module__}.{kind.__qualname__} has no Python source\n"
