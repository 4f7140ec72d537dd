"""Candidates onto sides: built files to descriptors of the keeper, one install a cut, contexts after it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from engines.client import Child
from engines.judge.rounds import Place
from engines.memory import SealedMemory
from engines.program import CandidateFailed
from engines.stable import Stable
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate, Reload
from hotpass.records.measurement import Failure, FailureKind, ReloadReport, Side


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFiles:
    """What builders made for one part."""

    native: Mapping[str, str]
    """Library name → path of a shared library."""
    derived: tuple[Mapping[str, Path], ...]
    """For each cut: concrete slot → safetensors file with its derived weights."""


OF_ONE_PAIR = 2
"""Candidates whose files are held between building and installing them."""

Builder = Callable[[Candidate, float], Sequence[PartFiles]]
"""(candidate, seconds left) → files, one entry a part in the candidate's order. Raises CandidateFailed."""


@runtime_checkable
class FindsCompiled(Protocol):
    """A builder that also knows where compiled code of candidates lies."""

    def compiled(self, candidate: Candidate) -> Path | None:
        """The folder of what was compiled ahead for the candidate, checked now; None where nothing was, or nothing needs to be."""
        ...


class Installer:
    """Puts candidates onto sides of children of one engine."""

    def __init__(self, stable: Stable, builder: Builder) -> None:
        self._stable = stable
        self._builder = builder
        self._lately: OrderedDict[str, Sequence[PartFiles]] = OrderedDict()

    def install(
        self,
        child: Child,
        side: Side,
        candidate: Candidate,
        places: Sequence[Place],
        deadline: float,
        late_rows: Collection[int] = (),
    ) -> ReloadReport:
        """The candidate on a side of every cut that the places name, with their contexts loaded; warm on all but the late rows, where
        there are any. Raises CandidateFailed."""
        if candidate == AS_LOADED:
            return self._as_loaded(child, side, places, deadline)
        start = time.perf_counter()
        files = self._files(candidate, deadline)
        compiled = self._builder.compiled(candidate) if isinstance(self._builder, FindsCompiled) else None
        built_ms = (time.perf_counter() - start) * 1e3
        reports = []
        for cut in sorted({cut for cut, _ in places}):
            native = [dict(item.native) for item in files]
            derived, fds = self._shared(files, cut)
            body = {
                "side": side.value,
                "candidate": candidate,
                "cut": cut,
                "native": native,
                "derived": derived,
                "compiled": str(compiled or ""),
                "rows": sorted({row for _, row in places} - set(late_rows)) if late_rows else None,
            }
            reports.append(child.call_record("install", body, ReloadReport, deadline=deadline, fds=fds))
        child.installed[side.value] = candidate.id
        contexts = time.perf_counter()
        self._stable.load_contexts(child, side.value, places, deadline)
        extra = {"build": built_ms, "contexts": (time.perf_counter() - contexts) * 1e3}
        return _merged(reports, candidate, side, extra)

    def uninstall(self, child: Child, side: Side, deadline: float) -> None:
        """The side as loaded. Raises CandidateFailed."""
        child.call_plain("uninstall", {"side": side.value}, deadline=deadline)
        child.installed[side.value] = AS_LOADED.id

    def build(self, candidate: Candidate, deadline: float) -> Sequence[PartFiles]:
        """What builders make for a candidate; quick when a builder has made it before. Raises CandidateFailed."""
        if not candidate.parts:
            return ()
        try:
            made = self._builder(candidate, deadline - time.monotonic())
        except InputError as error:  # of a part's text: the candidate's fault here, whoever asked
            raise CandidateFailed(Failure(kind=FailureKind.BUILD, message=str(error)[:500])) from None
        self._lately[candidate.id] = made
        while len(self._lately) > OF_ONE_PAIR:
            self._lately.popitem(last=False)
        return made

    def _files(self, candidate: Candidate, deadline: float) -> Sequence[PartFiles]:
        """As just built for this attempt: that the files are there need not be looked up twice within a second."""
        return self._lately.pop(candidate.id, None) or self.build(candidate, deadline)

    def _as_loaded(self, child: Child, side: Side, places: Sequence[Place], deadline: float) -> ReloadReport:
        start = time.perf_counter()
        self.uninstall(child, side, deadline)
        self._stable.load_contexts(child, side.value, places, deadline)
        phases = {"swap": (time.perf_counter() - start) * 1e3}
        return ReloadReport(
            candidate_id=AS_LOADED.id, side=side, declared=Reload.HOT, actual=Reload.HOT, phases_ms=phases
        )

    def _shared(self, files: Sequence[PartFiles], cut: int) -> tuple[list[dict[str, Any]], list[int]]:
        """Derived weights of each part through the keeper: entries of the request, and the descriptors beside it."""
        entries: list[dict[str, Any]] = []
        fds: list[int] = []
        for item in files:
            slots = dict(item.derived[cut]) if item.derived else {}
            entry: dict[str, Any] = {"slots": sorted(slots), "fd": -1, "index": None}
            if slots:
                memory: SealedMemory = self._stable.keeper.derived(slots)
                entry |= {"fd": len(fds), "index": memory.index}
                fds.append(memory.fd)
            entries.append(entry)
        return entries, fds


def _merged(
    reports: Sequence[ReloadReport], candidate: Candidate, side: Side, extra: Mapping[str, float]
) -> ReloadReport:
    """One report of the installs on all cuts: times add up."""
    phases = dict(extra)
    for report in reports:
        for name, value in report.phases_ms.items():
            phases[name] = phases.get(name, 0.0) + value
    return ReloadReport(
        candidate_id=candidate.id,
        side=side,
        declared=max((report.declared for report in reports), key=lambda kind: kind.rank),
        actual=max((report.actual for report in reports), key=lambda kind: kind.rank),
        phases_ms=phases,
        slots=tuple(sorted({slot for report in reports for slot in report.slots})),
        derived_bytes=sum(report.derived_bytes for report in reports),
    )
