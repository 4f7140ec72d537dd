"""Windows: k steps of one shape row, all logits into the buffer of the judge.

    tokens [steps, query_tokens] ──► step by step (teacher-forced) ──► out [steps, num_seqs, vocab] float32, then the reply

The copy into `out` is inside the window, since timed outputs are the checked outputs. The clock here is the child's own word, and so
are a GPU's events beside it; the judge has a clock of its own, and holds both against it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from engines.cuda.timing import device_marks
from engines.decoder.batch import build_batch
from engines.decoder.compile import compile_count
from engines.decoder.side import DecoderSide
from engines.decoder.source import failed_by
from engines.program import CandidateFailed, WindowInputs, WindowReply
from hotpass.records.measurement import FailureKind


def run_window(side: DecoderSide, row: int, inputs: WindowInputs, out: torch.Tensor) -> WindowReply:
    """Run the steps. A candidate's fault is the reply's `failure`; as loaded, whatever goes wrong is raised."""
    plan = side.plan
    steps = inputs.tokens.shape[0]
    expected = (steps, plan.rows[row].num_seqs, side.width(row))
    if out.shape != expected or out.dtype != torch.float32:
        raise ValueError(f"the output buffer is {out.dtype} {tuple(out.shape)}, not float32 {expected}")
    side.activate()
    side.reset_counts()
    compiled_before = compile_count()
    failure, done, captured, device_seconds = None, 0, 0, 0.0
    finish = device_marks(side.device)
    start = time.perf_counter()
    try:
        with torch.inference_mode():
            if side.graphs is not None:
                captured = side.graphs.renew()
            tokens = inputs.tokens.to(side.device)
            for done in range(steps):
                out[done].copy_(side.run(side.row_batch(row, done, tokens[done])))
            device_seconds = finish()
        done = steps
    except (Exception, SystemExit) as error:
        if side.installed is None:
            raise
        failure = as_failure(error).failure
    seconds = time.perf_counter() - start
    return WindowReply(
        nonce=inputs.nonce,
        seconds=seconds,
        steps=done,
        activation=side.counts(),
        compile_events=compile_count() - compiled_before + captured,
        failure=failure,
        device_seconds=device_seconds,
    )


def warm_up(side: DecoderSide, rows: Sequence[int] | None = None) -> None:
    """One step of those rows, so that nothing is first in a window; None: of every row and of the serving loop. Raises CandidateFailed, or
    as loaded whatever was raised."""
    side.activate()
    chosen = range(len(side.plan.rows)) if rows is None else rows
    try:
        with torch.inference_mode():
            for row in chosen if side.own is None else ():  # its caches come with contexts
                side.run(side.row_batch(row, 0, side.blank_step(row)))
            if rows is None:
                _warm_serving(side)
            synchronize(side.device)
    except (Exception, SystemExit) as error:
        if side.installed is None:
            raise
        raise as_failure(error) from None
    side.reset_counts()
    side.drop_templates()


def _warm_serving(side: DecoderSide) -> None:
    """What the serving loop may meet beyond the rows: a prompt of one token, and (for compiled code) of any number."""
    plan = side.plan
    if plan.serving_slots == 0:
        return
    slot = plan.num_slots - plan.serving_slots
    for query in (1, min(3, plan.serving_context)):
        tokens = torch.zeros(query, dtype=torch.int64, device=side.device)
        side.run(build_batch(tokens, contexts=[0], query_lens=[query], slots=[slot]))
    side.free_slot(slot)


def as_failure(error: BaseException) -> CandidateFailed:
    """What a candidate's code raised while it ran, as its failure."""
    return failed_by(error, FailureKind.EXCEPTION, "the forward fails")


def synchronize(device: torch.device) -> None:
    """Wait for every stream of a GPU, the candidate's own too."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
