"""Everything that a candidate needs before an engine can install it, as files: compiled libraries, derived weights, generated code.

    Candidate ──each part──► native files ──compiler──► libraries       }
                         └─► claimed slots of each cut ──worker──► derived weights }──► BuiltCandidate ──worker──► torch.compile's, Triton's code

Nothing of a candidate runs in this process. A candidate's fault raises CandidateFailed (kind build, or timeout at the deadline);
what the machine lacks raises MachineError. What is not here: loading any of it (`engines.judge.install`, the keeper, a child).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engines.build_compile import CompileSetup, compile_ahead, find, needs_compiling
from engines.build_derived import derive_weights, derives_weights
from engines.build_native import ALLOWED_FLAGS, Compiler, build_native, find_compiler
from engines.build_run import build_failed
from engines.build_worker import Job
from engines.judge.install import PartFiles
from engines.prepare.store import MODULE_FILE, layer_of, open_weights, with_layer
from hotpass.errors import InputError
from hotpass.parts import PartDeclaration, declaration
from hotpass.records.candidate import Candidate, PartUse
from hotpass.records.deployment import ModelRef
from hotpass.records.slots import ANY_DEPTH, SlotTable, claim_matches

__all__ = [
    "ALLOWED_FLAGS", "BuiltCandidate", "CandidateBuilder", "Compiler", "build_candidate", "build_native", "derive_weights",
    "find_compiler",
]  # fmt: skip

WHOLE = "model"
"""The slot of the whole forward."""
NO_CLASSES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltCandidate:
    """What was made for a candidate."""

    candidate_id: str
    parts: tuple[PartFiles, ...]
    """One entry a part, in the candidate's order."""
    native_seconds: float
    """Compiling, or finding what was compiled before."""
    derive_seconds: float


def build_candidate(
    candidate: Candidate,
    model: ModelRef,
    slots: SlotTable | Sequence[str],
    cuts: Sequence[tuple[int, ...]],
    *,
    cache_dir: Path | str | None = None,
    threads: int = 1,
    deadline_seconds: float = 120.0,
) -> BuiltCandidate:
    """Compile and derive whatever the candidate's parts declare; what is in the cache is only named.

    `slots`: the slot table of the whole model, or its names. `cuts`: layers of each cut that an engine has loaded; concrete
    slots in the result are numbered within the cut. Raises CandidateFailed.
    """
    ends = time.monotonic() + deadline_seconds
    names = slots.names() if isinstance(slots, SlotTable) else tuple(slots)
    parts: list[PartFiles] = []
    native_seconds = derive_seconds = 0.0
    for use in candidate.parts:
        declared, bound = _bound(use)
        start = time.monotonic()
        native = build_native(
            bound.source,
            declared,
            bound.params,
            cache_dir=cache_dir,
            threads=threads,
            deadline_seconds=ends - start,
        )
        built = time.monotonic()
        derived = _derived(bound, declared, model, names, cuts, cache_dir, threads, ends - built)
        native_seconds += built - start
        derive_seconds += time.monotonic() - built
        parts.append(PartFiles(native={name: str(path) for name, path in native.items()}, derived=derived))
    return BuiltCandidate(
        candidate_id=candidate.id, parts=tuple(parts), native_seconds=native_seconds, derive_seconds=derive_seconds
    )


class CandidateBuilder:
    """Builds for one model and its cuts: the `builder` of an engine, and what a builder process runs ahead of it."""

    def __init__(
        self,
        model: ModelRef,
        cuts: Sequence[tuple[int, ...]],
        *,
        slots: SlotTable | None = None,
        cache_dir: Path | str | None = None,
        threads: int = 1,
        setup: CompileSetup | None = None,
    ) -> None:
        """Without a slot table, slots are the modules that have weights, which are all that can derive any. Without a `setup` no code
        is compiled ahead: the engine's children compile what they run."""
        self._model, self._cuts = model, tuple(tuple(cut) for cut in cuts)
        self._slots: SlotTable | tuple[str, ...] = slots or module_names(model)
        self._cache_dir, self._threads, self._setup = cache_dir, threads, setup
        self._shallowest = min(range(len(self._cuts)), key=lambda index: len(self._cuts[index]))

    def __call__(self, candidate: Candidate, seconds: float) -> tuple[PartFiles, ...]:
        """Files, one entry a part. Raises CandidateFailed."""
        return self.build(candidate, seconds).parts

    def build(self, candidate: Candidate, deadline_seconds: float) -> BuiltCandidate:
        """The same with what it took."""
        return build_candidate(
            candidate,
            self._model,
            self._slots,
            self._cuts,
            cache_dir=self._cache_dir,
            threads=self._threads,
            deadline_seconds=deadline_seconds,
        )

    def compile_ahead(self, candidate: Candidate, files: Sequence[PartFiles], deadline_seconds: float) -> Path | None:
        """Have inductor and Triton run for the candidate, whose `files` are built, in a process of its own. The folder of what they
        made; None where neither would run. Raises CandidateFailed."""
        if self._setup is None or not needs_compiling(candidate, self._setup.device):
            return None
        return compile_ahead(
            candidate,
            self._setup,
            self._cuts[self._shallowest],
            files,
            cut_index=self._shallowest,
            cache_dir=self._cache_dir,
            deadline_seconds=deadline_seconds,
        )

    def compiled(self, candidate: Candidate) -> Path | None:
        """What `compile_ahead` made before, every byte as it was hashed; None where there is nothing."""
        if self._setup is None or not needs_compiling(candidate, self._setup.device):
            return None
        return find(candidate, self._setup, self._cuts[self._shallowest], cache_dir=self._cache_dir)


def module_names(model: ModelRef) -> tuple[str, ...]:
    """`model`, and the path of every module with weights below it, in the order of the file."""
    names = {WHOLE: None}
    for parameter in open_weights(model):
        components = parameter.split(".")
        for depth in range(1, len(components)):
            names[".".join(components[:depth])] = None
    return tuple(names)


def module_classes(model: ModelRef) -> dict[str, str]:
    """Path → class, of a module; empty for a language model, whose claims by path need no classes."""
    path = Path(model.folder) / MODULE_FILE
    return dict(json.loads(path.read_text())["classes"]) if path.exists() else {}


def jobs_of_cut(
    declared: PartDeclaration, names: Sequence[str], cut: Sequence[int], classes: Mapping[str, str] = NO_CLASSES
) -> dict[str, Job]:
    """Concrete slot of the cut → what has to be derived for it. `classes` decides where a claim names a class at any depth."""
    jobs: dict[str, Job] = {}
    for name in names:
        claims = [claim for claim in declared.claims if claim_matches(claim, name)]
        if declared.replaces and classes.get(name, declared.replaces) != declared.replaces:
            claims = [claim for claim in claims if ANY_DEPTH not in claim.split(".")]
        if not claims:
            continue
        layer = layer_of(name)
        if name == WHOLE:
            jobs[name] = Job(slot=name, layers=tuple(cut))
        elif layer is None:
            jobs[name] = Job(slot=name, layers=None)
        elif layer in cut:
            jobs[with_layer(name, list(cut).index(layer))] = Job(slot=name, layers=None)
    return jobs


def _bound(use: PartUse) -> tuple[PartDeclaration, PartUse]:
    """The part with every parameter bound, so that defaults written out or left out build the same."""
    try:
        declared = declaration(use.source)
        return declared, declared.bind(use.source, use.params)
    except InputError as error:
        raise build_failed(str(error)) from None


def _derived(
    use: PartUse,
    declared: PartDeclaration,
    model: ModelRef,
    names: Sequence[str],
    cuts: Sequence[tuple[int, ...]],
    cache_dir: Path | str | None,
    threads: int,
    deadline_seconds: float,
) -> tuple[dict[str, Path], ...]:
    """For each cut: concrete slot → file; empty for a part without `weights`."""
    if not derives_weights(use.source):
        return tuple({} for _ in cuts)
    classes = module_classes(model)
    wanted = [jobs_of_cut(declared, names, cut, classes) for cut in cuts]
    jobs = list(dict.fromkeys(job for cut in wanted for job in cut.values()))
    files = derive_weights(use, model, jobs, cache_dir=cache_dir, threads=threads, deadline_seconds=deadline_seconds)
    return tuple({slot: files[job] for slot, job in cut.items()} for cut in wanted)
