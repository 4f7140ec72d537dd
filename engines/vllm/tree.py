"""vLLM's module tree with parts on it: which slots there are, and what runs at them on which side.

    install(side, candidate) ──► instances behind dispatchers, kept aside      activate(side) ──► that side's dispatchers on the modules

There is one tree and one set of weights, so at most one side's parts are on it at any time: while the incumbent runs, nothing of the
candidate is there. Runs inside vLLM's worker; knows the step only by vLLM's own attention metadata. Settings of hotpass are refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from engines.decoder import placing
from engines.decoder.placing import Forward
from engines.decoder.source import CompiledPart, failed, failed_by
from engines.prepare.store import layer_of
from engines.program import Artefacts
from engines.vllm import slots
from engines.vllm.compiled import CompiledStates, Opaque
from engines.vllm.step import Step
from hotpass.canonical import bytes_hash
from hotpass.records.candidate import Candidate, Reload
from hotpass.records.measurement import FailureKind, ReloadReport, Side
from hotpass.records.slots import SlotTable

CPU = torch.device("cpu")


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
        self.modules = slots.slot_modules(root)
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
            self._table = slots.slot_table(self.root, self._version)
        return self._table

    def part_template(self, slot: str) -> str:
        """A runnable part that does what vLLM does at a slot, to start from; KeyError for a name that is none."""
        return slots.part_template(slot, self.modules[slot], self._config)

    def install(self, side: str, candidate: Candidate, artefacts: Artefacts) -> ReloadReport:
        """In place of what the side had. Raises CandidateFailed, with the side as loaded."""
        self.uninstall(side)
        installed = Installed(candidate=candidate)
        phases: dict[str, float] = {}
        try:
            start = time.perf_counter()
            check_settings(candidate)
            parts = placing.compiled(candidate, "vllm", CPU.type, installed.undo)
            declared = self._checked_reload(parts)
            claimed = placing.claimed(parts, self.slots())
            phases["source"] = (time.perf_counter() - start) * 1e3
            start = time.perf_counter()
            derived_bytes = self._place(installed, parts, claimed, artefacts)
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
        return ReloadReport(
            candidate_id=candidate.id,
            side=Side(side),
            declared=declared,
            actual=Reload.REWEIGHT if derived_bytes else self._least_reload(parts),
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
        self.compiled.dry(False)  # an eager step to learn by may have raised
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

    def _put_on(self, forwards: Mapping[str, Forward]) -> None:
        for name, forward in forwards.items():
            self.modules[name].__dict__["forward"] = forward

    def _forwards(self, side: str) -> dict[str, Forward]:
        return self._sides[side].forwards if side in self._sides else {}

    def _least_reload(self, parts: Sequence[CompiledPart]) -> Reload:
        """What a swap of forwards takes here: where they are compiled in, swapping alone changes nothing."""
        return Reload.RECAPTURE if parts and self.compiled.compiles else Reload.HOT

    def _checked_reload(self, parts: Sequence[CompiledPart]) -> Reload:
        """The widest declared class. Raises CandidateFailed for a part that says `hot` of what must be compiled again."""
        least = self._least_reload(parts)
        for part in parts:
            if part.declared.reload.rank < least.rank:
                problem = (
                    f"part {part.name} declares reload={part.declared.reload}, but vLLM has compiled its forwards in"
                )
                raise failed(FailureKind.INSTALL, f"{problem}: declare reload={least}, or load with enforce_eager")
        return max((part.declared.reload for part in parts), key=lambda kind: kind.rank, default=Reload.HOT)

    def _place(
        self,
        installed: Installed,
        parts: Sequence[CompiledPart],
        claimed: Sequence[tuple[str, ...]],
        artefacts: Artefacts,
    ) -> int:
        """An instance of its part for every claimed slot, prepared. Returns bytes of derived weights."""
        total = 0
        for index, (part, claims) in enumerate(zip(parts, claimed, strict=True)):
            native = placing.libraries(part, artefacts, index)
            serves = partial(self.step.within, part.declared.parsed_domain)
            for slot in claims:
                weights = placing.derived_weights(part, artefacts, index, slot, CPU)
                total += sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
                fallback = installed.forwards.get(slot) or self.modules[slot].forward
                context = placing.Context(
                    weights=weights,
                    config=self._config,
                    device=CPU,
                    threads=self._threads,
                    settings={},
                    native=native,
                    slot=slot,
                    layer=layer_of(slot),
                    kv=None,
                    step=self.step,
                    keeps=placing.kept_children(part, slot, self.modules),
                    fallback=fallback,
                )
                forward = placing.prepared(part, context, installed.undo)
                installed.counts[slot] = 0
                installed.forwards[slot] = placing.dispatcher(forward, fallback, serves, installed.counts, slot)
        return total


def check_settings(candidate: Candidate) -> None:
    """Raises CandidateFailed for what vLLM takes at load only."""
    for name, value in candidate.settings.items():
        raise failed(FailureKind.INSTALL, f"setting {name}={value}: the vllm engine takes its arguments at load only")
    for name, degree in candidate.parallelism.items():
        if degree != 1:
            raise failed(FailureKind.INSTALL, f"parallelism {name}={degree}: the vllm engine runs with one rank")
