"""Putting a candidate on a side, and taking it off.

    declarations ──► slots claimed, conflicts refused ──► settings ──► sources compiled ──► one instance a slot, prepared
                 ──► dispatchers swapped in, root to leaves ──► compile, graphs ──► warm-up

A part sits behind a dispatcher, the instance `forward` of its module (or the side's forward for slot `model`): where the part's domain
serves the step, the part runs and is counted; else what stood there before. Every step of an install leaves its undo on one stack, so
that a failure in the middle and an uninstall restore the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

import torch

from engines.decoder import compile as compiling
from engines.decoder import placing
from engines.decoder.attention import StepState
from engines.decoder.graphs import capture_rows
from engines.decoder.kv import KvPool
from engines.decoder.side import DecoderSide, Installed
from engines.decoder.slots import WHOLE
from engines.decoder.source import CompiledPart, failed, failed_by
from engines.decoder.windows import warm_up
from engines.prepare.store import layer_of
from engines.program import Artefacts
from engines.stopwatch import Stopwatch
from hotpass.domain import Domain
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate, Reload, Value
from hotpass.records.measurement import FailureKind, ReloadReport, Side
from hotpass.records.slots import SlotTable
from hotpass.settings import BY_NAME, DEFAULTS, check_setting, reload_of_settings

MakePool = Callable[[torch.dtype | None], KvPool]
"""A new KV pool; None is the model's declared dtype."""


class Gate:
    """Whether a part's domain serves the step that runs; decided once a step, however many slots ask."""

    def __init__(self, domain: Domain, step: StepState) -> None:
        self._domain = domain
        self._step = step
        self._serial = -1
        self._open = False

    def serves(self) -> bool:
        step = self._step
        if step.serial != self._serial:
            batch = step.batch
            assert batch is not None
            self._open = self._domain.serves(
                phase=batch.phase, num_seqs=batch.num_seqs, query_tokens=batch.query_tokens, context=batch.context
            )
            self._serial = step.serial
        return self._open


def install(
    side: DecoderSide,
    candidate: Candidate,
    artefacts: Artefacts,
    table: SlotTable,
    make_pool: MakePool,
    rows: Sequence[int] | None = None,
) -> ReloadReport:
    """Put the candidate on the side, in place of what was there; `rows` are to be warmed up, as in `Program.install`. Raises
    CandidateFailed, with the side as loaded."""
    side.uninstall()
    watch = Stopwatch()
    undo = ExitStack()
    compiled_before = compiling.compile_count()
    try:
        settings = _checked_settings(candidate, side)
        parts = placing.compiled(candidate, table.engine, side.device.type, undo)
        claimed = placing.claimed(parts, table)
        _refuse_whole(parts, claimed, side)
        watch.lap("source")
        actual = _apply_settings(side, settings, make_pool, undo)
        watch.lap("kv")
        if candidate.parts or settings["compile_mode"] != "none":
            compiling.use_cache(side, candidate.id, artefacts.compiled, undo)
        counts = {slot: 0 for slots in claimed for slot in slots}
        if candidate != AS_LOADED:
            side.installed = Installed(candidate=candidate, undo=undo, counts=counts)
        undo.callback(setattr, side, "installed", None)
        undo.callback(side.drop_templates)
        derived_bytes = _place(side, parts, claimed, counts, artefacts, settings, undo, watch)
        if settings["compile_mode"] != "none":
            compiling.compile_layers(side, str(settings["compile_mode"]), frozenset(counts), undo)
        known = compiling.graphs_compiled()
        warm_up(side, rows)
        # What is to be compiled compiles when it first runs, unless a builder did it before.
        by_builder = artefacts.compiled and compiling.graphs_compiled() == known
        watch.lap("warm-up" if settings["compile_mode"] == "none" or by_builder else "compile")
        if settings["cuda_graphs"]:
            capture_rows(side, undo)
            watch.lap("capture")
    except (Exception, SystemExit) as error:
        with suppress(Exception):  # of two errors the first is the one to tell
            undo.close()
        if candidate == AS_LOADED:
            raise
        raise failed_by(error, FailureKind.INSTALL, "the install fails") from None
    actual = max(actual, _taken_by_parts(side, compiled_before, derived_bytes), key=lambda kind: kind.rank)
    declared = [part.declared.reload for part in parts] + [reload_of_settings(settings)]
    return ReloadReport(
        candidate_id=candidate.id,
        side=Side(side.name),
        declared=max(declared, key=lambda kind: kind.rank),
        actual=actual,
        phases_ms=watch.phases_ms,
        slots=tuple(sorted(counts)),
        derived_bytes=derived_bytes,
    )


def _taken_by_parts(side: DecoderSide, compiled_before: int, derived_bytes: int) -> Reload:
    """The costliest reload that shows in what the parts did, whatever they declare."""
    if not side.keeps_its_kv:
        return Reload.REKV
    if derived_bytes:
        return Reload.REWEIGHT
    return Reload.RECAPTURE if compiling.compile_count() > compiled_before else Reload.HOT


def _checked_settings(candidate: Candidate, side: DecoderSide) -> dict[str, Value]:
    wide = {name: degree for name, degree in candidate.parallelism.items() if degree != 1}
    if wide:
        listed = ", ".join(f"{name}={degree}" for name, degree in sorted(wide.items()))
        raise failed(FailureKind.INSTALL, f"parallelism {listed}: the decoder engine runs with degree 1 only")
    settings = dict(DEFAULTS)
    for name, value in candidate.settings.items():
        try:
            settings[name] = check_setting(name, value)
        except InputError as error:
            raise failed(FailureKind.INSTALL, str(error)) from None
        if settings[name] != DEFAULTS[name] and name not in side.takes:
            raise failed(FailureKind.INSTALL, f"setting {name} means nothing here; known: {sorted(side.takes)}")
        meant_for = BY_NAME[name].device
        if settings[name] != DEFAULTS[name] and meant_for not in ("any", side.device.type):
            raise failed(
                FailureKind.INSTALL, f"setting {name}={value} needs a {meant_for} device; this is {side.device}"
            )
    if side.own is not None and settings["kv_dtype"] != DEFAULTS["kv_dtype"]:
        raise failed(FailureKind.INSTALL, f"setting kv_dtype: {side.net.reason}, so transformers keeps the KV cache")
    return settings


def _refuse_whole(parts: Sequence[CompiledPart], claimed: Sequence[tuple[str, ...]], side: DecoderSide) -> None:
    """Raises CandidateFailed for a claim of `model` where transformers keeps the cache."""
    for part, slots in zip(parts, claimed, strict=True):
        if WHOLE in slots and side.own is not None:
            problem = f"claims model, but {side.net.reason}, so there are no KV slots for it"
            raise failed(FailureKind.INSTALL, f"part {part.name} {problem}")


def _apply_settings(side: DecoderSide, settings: dict[str, Value], make_pool: MakePool, undo: ExitStack) -> Reload:
    """Threads, serving limits and KV dtype. Returns the reload class that this took."""
    undo.callback(setattr, side, "settings", side.settings)
    undo.callback(setattr, side, "threads", side.threads)
    side.settings = settings
    if settings["threads"] is not None:
        side.threads = int(settings["threads"])
    actual = Reload.HOT
    if settings["compile_mode"] != "none" or settings["cuda_graphs"]:
        actual = Reload.RECAPTURE
    name = settings["kv_dtype"]
    if name != "auto" and getattr(torch, str(name)) != side.kv.dtype:
        side.replace_kv(make_pool(getattr(torch, str(name))))
        undo.callback(lambda: side.replace_kv(make_pool(None)))
        actual = Reload.REKV
    side.activate()
    return actual


def _place(
    side: DecoderSide,
    parts: Sequence[CompiledPart],
    claimed: Sequence[tuple[str, ...]],
    counts: dict[str, int],
    artefacts: Artefacts,
    settings: Mapping[str, Value],
    undo: ExitStack,
    watch: Stopwatch,
) -> int:
    """An instance of its part behind a dispatcher at every claimed slot, root first. Returns bytes of derived weights."""
    natives = [placing.libraries(part, artefacts, index) for index, part in enumerate(parts)]
    gates = [Gate(part.declared.parsed_domain, side.step) for part in parts]
    order = sorted(
        ((slot, index) for index, slots in enumerate(claimed) for slot in slots),
        key=lambda pair: (pair[0] != WHOLE, pair[0].count(".")),
    )
    derived_bytes = 0
    for slot, index in order:
        part = parts[index]
        weights = placing.derived_weights(part, artefacts, index, slot, side.device)
        derived_bytes += sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        fallback = side.forward if slot == WHOLE else side.net.modules[slot].forward
        context = placing.Context(
            weights=weights,
            config=side.net.config,
            device=side.device,
            threads=side.threads,
            settings=settings,
            native=natives[index],
            slot=slot,
            layer=layer_of(slot),
            kv=side.kv,
            step=side.step,
            keeps=placing.kept_children(part, slot, side.net.modules),
            fallback=fallback,
        )
        forward = placing.prepared(part, context, undo)
        watch.lap("prepare")
        dispatch = placing.dispatcher(forward, fallback, gates[index].serves, counts, slot)
        if slot == WHOLE:
            undo.callback(setattr, side, "forward", side.forward)
            side.forward = dispatch
        else:
            module = side.net.modules[slot]
            _restore_forward(module, undo)
            module.__dict__["forward"] = dispatch
        watch.lap("swap")
    return derived_bytes


def _restore_forward(module: torch.nn.Module, undo: ExitStack) -> None:
    if "forward" in module.__dict__:
        undo.callback(module.__dict__.__setitem__, "forward", module.__dict__["forward"])
    else:
        undo.callback(module.__dict__.pop, "forward", None)
