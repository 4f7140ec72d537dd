"""A small numerics check of one part, for whoever writes it: does it run at all, and does it give what the reference gives?

    quick_check(use) ─► compiler for its C++ ─► python -m engines.quick_check FOLDER ─► reference | as loaded | the part, on three steps

One process, confined as an engine's children are, on one layer of the real model (of a module: on all of it, with inputs like its
examples), on the CPU, with one thread. It takes seconds and
a few hundred megabytes, and is **no verdict**: a part that wanted to could write its own answer here. The judge's engines alone
decide. What is not here: timing anything, and who may ask when (`cluster.desk` takes the measuring lease around it).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines.build_native import build_native
from engines.build_run import BuildLimits, run_limited
from engines.program import CandidateFailed
from engines.threading_env import process_environment
from hotpass.canonical import to_plain
from hotpass.decode import DecodeError, from_plain
from hotpass.parts import declaration
from hotpass.records.candidate import Numerics, PartUse
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import Failure, FailureKind
from hotpass.records.shapes import Phase, ShapeRow

if TYPE_CHECKING:
    import torch

    from engines.decoder.program import DecoderProgram
    from engines.module.program import ModuleProgram
    from engines.prepare.store import WeightStore
    from engines.program import KvPlan

LIMITS = BuildLimits(memory_bytes=24 << 30, file_bytes=64 << 20)
"""Address space holds the libraries and the mapped weights; little of it is ever touched."""

SUSPICIOUS, SUSPICIOUS_LOSSY = 2e-2, 0.3
"""Root mean square error over the reference's own root mean square from which a part looks wrong rather than rounded: five times the
rounding step of bfloat16 (2⁻⁸); more for a part that declares itself lossy, whose error is a choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRow:
    """One step of the check."""

    shape: str
    """As `decode n2 q2 c12`."""
    max_abs: float
    """Largest difference of the part's outputs from the reference's; infinity for NaN or infinity."""
    relative_rms: float
    """Root mean square difference over the reference's root mean square."""
    loaded_max_abs: float
    """The same of the deployment as loaded, which only rounds."""
    calls: int
    """Of the part; 0 where the step lies outside of its domain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickReport:
    """What the check found."""

    rows: tuple[CheckedRow, ...] = ()
    failure: Failure | None = None
    seconds: float = 0.0
    bound: float = SUSPICIOUS
    """Relative error from which it looks wrong."""

    @property
    def problem(self) -> str:
        """In one sentence; empty when nothing looks wrong."""
        if self.failure is not None:
            return f"{self.failure.kind}: {self.failure.message}"
        if not any(row.calls for row in self.rows):
            return "the part never ran: no step of the check lies in its domain, or it claims a layer beyond the first"
        wrong = [row for row in self.rows if row.calls and not row.relative_rms < self.bound]
        if wrong:
            worst = max(wrong, key=lambda row: row.relative_rms)
            return f"wrong on {worst.shape}: outputs differ by up to {worst.max_abs:.3g} ({worst.relative_rms:.2g} of their size)"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Everything that the process needs; crosses as JSON."""

    use: PartUse
    model: ModelRef
    native: Mapping[str, str]


def quick_check(
    use: PartUse, model: ModelRef, *, cache_dir: Path | str | None = None, deadline_seconds: float = 60.0
) -> QuickReport:
    """Never raises for what the part does wrong. Nothing of the part runs in this process."""
    declared = declaration(use.source)
    lossy = declared.numerics_of(use.params, model.dtype) is Numerics.LOSSY
    try:
        native = build_native(use.source, declared, use.params, cache_dir=cache_dir, deadline_seconds=deadline_seconds)
    except CandidateFailed as failed:
        return QuickReport(failure=failed.failure)
    request = Request(use=use, model=model, native={name: str(path) for name, path in native.items()})
    with tempfile.TemporaryDirectory(prefix="hotpass-check-") as made:
        folder = Path(made)
        (folder / "request.json").write_text(json.dumps(to_plain(request)), encoding="utf-8")
        done = run_limited(
            [sys.executable, "-m", "engines.quick_check", made],
            folder=folder,
            environment=process_environment(1) | {"TMPDIR": made, "HOME": made},
            deadline_seconds=deadline_seconds,
            limits=LIMITS,
        )
        if done.timed_out:
            message = f"had not ended after {deadline_seconds:.0f} s"
            return QuickReport(failure=Failure(kind=FailureKind.TIMEOUT, message=message), seconds=done.seconds)
        try:
            reply = json.loads((folder / "reply.json").read_text(encoding="utf-8"))
            rows = tuple(from_plain(CheckedRow, row) for row in reply["rows"])
            failure = from_plain(Failure, reply["failure"]) if reply["failure"] else None
        except (OSError, ValueError, KeyError, TypeError, DecodeError):
            ending = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
            message, detail = f"ended its process ({ending}) before the check was done", done.output
            return QuickReport(
                failure=Failure(kind=FailureKind.CRASH, message=message, detail=detail), seconds=done.seconds
            )
    return QuickReport(
        rows=rows, failure=failure, seconds=done.seconds, bound=SUSPICIOUS_LOSSY if lossy else SUSPICIOUS
    )


STEPS = 2
"""Of each row: the second sees whatever the part keeps from the first."""


def _step(phase: Phase, num_seqs: int, query_tokens: int, context: int) -> ShapeRow:
    return ShapeRow(
        phase=phase, num_seqs=num_seqs, query_tokens=query_tokens, context_mean=context, context_max=context,
        steps_share=0.25, tokens_share=0.25,
    )  # fmt: skip


ROWS = (
    _step(Phase.DECODE, 1, 1, 12),
    _step(Phase.DECODE, 3, 3, 12),
    _step(Phase.PREFILL, 2, 9, 0),
    _step(Phase.MIXED, 3, 8, 7),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """What the part is checked on: two steps of each row."""

    program: DecoderProgram | ModuleProgram
    store: WeightStore
    plan: KvPlan
    layers: tuple[int, ...] | None
    """Of the cut; None for the whole of a module."""
    tokens: list[torch.Tensor]
    """By row."""
    contexts: list[list[torch.Tensor]]


def _decoder(model: ModelRef) -> _Subject:
    """One layer."""
    import torch

    from engines.decoder.program import DecoderProgram
    from engines.prepare.store import open_weights
    from engines.program import KvPlan

    plan = KvPlan(rows=ROWS, steps_per_window=(STEPS,) * len(ROWS), serving_slots=1, serving_context=32)
    program, store = DecoderProgram(), open_weights(model)
    program.load(model, store, [(0,)], "cpu", 1, plan)
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(0, model.vocab_size, shape, generator=generator)

    tokens = [drawn(STEPS, row.query_tokens) for row in ROWS]
    contexts = [
        program.compute_contexts(0, row, [drawn(n) for n in plan.row_contexts(row)]) for row in range(len(ROWS))
    ]
    return _Subject(program=program, store=store, plan=plan, layers=(0,), tokens=tokens, contexts=contexts)


def _module(model: ModelRef) -> _Subject:
    """All of it, on inputs drawn like its examples."""
    import torch

    from engines.module.inputs import ModuleInputs
    from engines.module.opened import open_module
    from engines.module.prepare import module_facts

    program, store, plan = open_module(model, steps=STEPS)
    inputs = ModuleInputs(module_facts(model).examples, 7)
    tokens = [torch.from_numpy(inputs.steps(row, STEPS)) for row in range(len(plan.rows))]
    contexts: list[list[torch.Tensor]] = [[] for _ in plan.rows]
    return _Subject(program=program, store=store, plan=plan, layers=None, tokens=tokens, contexts=contexts)


def _checked(request: Request) -> list[CheckedRow]:
    """In the confined process. Raises CandidateFailed."""
    import ctypes

    import torch

    from engines.build_worker import Job, weights_of
    from engines.decoder.source import compile_part, derive
    from engines.module.opened import is_module
    from engines.program import Artefacts, WindowInputs
    from hotpass.records.candidate import Candidate

    torch.manual_seed(0)
    subject = _module(request.model) if is_module(request.model) else _decoder(request.model)
    program, plan = subject.program, subject.plan

    def ran(side: str, row: int) -> tuple[torch.Tensor, int]:
        program.load_contexts(side, 0, row, subject.contexts[row])
        out = torch.full((STEPS, plan.rows[row].num_seqs, plan.width(row, request.model.vocab_size)), float("nan"))
        reply = program.run_window(side, 0, row, WindowInputs(tokens=subject.tokens[row], nonce="check"), out)
        if reply.failure is not None:
            raise CandidateFailed(reply.failure)
        return out, sum(reply.activation.values())

    before = [(ran("reference", row)[0], ran("incumbent", row)[0]) for row in range(len(plan.rows))]
    part, declared = compile_part(request.use), declaration(request.use.source)
    slots = {slot.name for claim in declared.claims for slot in program.slots().matching(claim)}
    derived = (
        {slot: derive(part, weights_of(subject.store, Job(slot=slot, layers=subject.layers))) for slot in sorted(slots)}
        if part.has_weights
        else {}
    )
    part.forget()
    for path in request.native.values():
        ctypes.CDLL(path)
    artefacts = Artefacts(native=(dict(request.native),), derived=(derived,))
    program.install("candidate", Candidate(parts=(request.use,)), artefacts, 0)
    rows = []
    for index, (reference, loaded) in enumerate(before):
        out, calls = ran("candidate", index)
        difference = (out - reference).double()
        finite = bool(torch.isfinite(difference).all())
        rows.append(
            CheckedRow(
                shape=plan.rows[index].key,
                max_abs=float(difference.abs().max()) if finite else float("inf"),
                relative_rms=float(difference.norm() / reference.double().norm()) if finite else float("inf"),
                loaded_max_abs=float((loaded - reference).abs().max()),
                calls=calls,
            )
        )
    return rows


def main() -> None:
    """`python -m engines.quick_check FOLDER`."""
    from engines.child import failure_of
    from engines.confine import confine
    from engines.limits import leave_network
    from hotpass.decode import json_safe

    folder = Path(sys.argv[1])
    request = from_plain(Request, json.loads((folder / "request.json").read_text(encoding="utf-8")))
    leave_network()
    confine(folder)
    rows: list[CheckedRow] = []
    failure = None
    try:
        rows = _checked(request)
    except BaseException as error:  # sys.exit of a part is its failure, too
        failure = failure_of(error)
    reply = {"rows": json_safe(rows), "failure": to_plain(failure) if failure else None}
    (folder / "reply.json").write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    main()
