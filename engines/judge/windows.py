"""One timed window: poison the buffer, send the request, sleep until the reply, take the logits out of the child's reach.

    judge: poison ─ clock ─ send ────────── sleep ───────── reply ─ clock ─ copy of the logits ─ facts of the reply checked
    child:                  steps of the row, logits into the buffer

The clock of record is the judge's. The child's own time only has to agree with it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engines.client import Child, token_bytes
from engines.program import CandidateFailed, Echo, KvPlan, WindowReply
from engines.wire import encode
from hotpass.records.candidate import AS_LOADED
from hotpass.records.measurement import Failure, FailureKind

MAX_REPEATS = 3
"""Windows in which something was compiled are repeated so often, then they are the candidate's failure (FAILURES E2, E3)."""

CLAIMED_TIME_SLACK = 1.02
"""A child's own time over the judge's beyond which it lies: the judge's window contains the child's."""

CLAIMED_SHARE = 0.5
"""Share of the time that it ran, by the kernel's count, below which a child lies about its own: it cannot have run while no time passed.
Unlike the judge's clock this one stands still while a message waits on a busy machine, and no patch in the process reaches it, so that a
clock that lies about both sides is found as well."""

MESSAGE_SECONDS = 1e-2
MESSAGE_BYTES_PER_SECOND = 1e8
"""What a child may run beside its own window: reading a request of so many bytes and answering it, with cold caches on a machine that many
share. Windows that are not longer than that say nothing; there are longer ones on every deployment."""

MAX_SHORT_CLAIMS = 3
"""Windows in a row of which it claims less than that, after which it is a lie: a hypervisor that takes the core away while a message is
read counts as running, too, but not each time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What one window gave."""

    seconds: float
    """By the judge's clock, request to reply."""
    child_seconds: float
    logits: np.ndarray
    """float32 [steps, num_seqs, vocab], the judge's own copy."""
    activation: Mapping[str, int]
    device_seconds: float = 0.0
    """By a GPU's events; 0 on a CPU."""

    @property
    def clock_ratio(self) -> float:
        """The child's clock over the judge's, or its device's where that is further from 1: work on a stream that nothing waits for is
        not between the events."""
        ratios = [self.child_seconds / self.seconds]
        if self.device_seconds:
            ratios.append(self.device_seconds / self.seconds)
        return max(ratios, key=lambda ratio: abs(math.log(ratio)))


def run_window(
    child: Child, side: str, cut: int, row: int, tokens: np.ndarray, *, plan: KvPlan, vocab: int, deadline: float
) -> Window:
    """Run a window, again while something was compiled in it. Raises CandidateFailed."""
    for _ in range(MAX_REPEATS):
        window, compile_events = _run_once(child, side, cut, row, tokens, plan, vocab, deadline)
        if compile_events == 0:
            return window
    message = f"compiled inside {MAX_REPEATS} windows of {plan.rows[row].key} in a row"
    raise CandidateFailed(Failure(kind=FailureKind.PROTOCOL, message=message))


def _run_once(
    child: Child, side: str, cut: int, row: int, tokens: np.ndarray, plan: KvPlan, vocab: int, deadline: float
) -> tuple[Window, int]:
    shape = (len(tokens), plan.rows[row].num_seqs, plan.width(row, vocab))
    nonce = secrets.token_hex(8)
    body = {"side": side, "cut": cut, "row": row, "nonce": nonce, "shape": shape}
    frame = encode("window", body, token_bytes(tokens))
    child.out.poison(shape[0] * shape[1] * shape[2])
    ran_before = child.ran_seconds()
    plain, seconds = child.timed_call(frame, deadline=deadline)
    ran_after = child.ran_seconds()
    logits = child.out.taken(shape)
    reply = child.decoded(WindowReply, plain)
    if reply.failure is not None:
        raise CandidateFailed(reply.failure)
    if reply.nonce != nonce or reply.steps != len(tokens):
        raise child.broken(f"the reply is to another window: {reply.steps} steps of {len(tokens)}")
    check_echo(child, side, reply.echo)
    if not 0 < reply.seconds <= seconds * CLAIMED_TIME_SLACK + 1e-4:
        raise child.broken(f"the child claims {reply.seconds:.6f} s in a window of {seconds:.6f} s")
    ran = 0.0 if ran_before is None or ran_after is None else ran_after - ran_before
    least = least_claim(ran, len(frame))
    if least:  # one in which it hardly ran says nothing
        child.short_claims = child.short_claims + 1 if reply.seconds < least else 0
    if child.short_claims >= MAX_SHORT_CLAIMS:
        raise child.broken(f"the child claims {reply.seconds:.6f} s in a window in which it ran {ran:.6f} s")
    if not 0 <= reply.device_seconds <= seconds * CLAIMED_TIME_SLACK + 1e-4:
        raise child.broken(f"the device's events say {reply.device_seconds:.6f} s in a window of {seconds:.6f} s")
    window = Window(
        seconds=seconds,
        child_seconds=reply.seconds,
        logits=logits,
        activation=dict(reply.activation),
        device_seconds=reply.device_seconds,
    )
    return window, reply.compile_events


def least_claim(ran_seconds: float, request_bytes: int) -> float:
    """Seconds that an honest child says at least of a window in which the kernel saw it run so long."""
    beside = MESSAGE_SECONDS + request_bytes / MESSAGE_BYTES_PER_SECOND
    return CLAIMED_SHARE * max(0.0, ran_seconds - beside)


class Booked(Protocol):
    """What the judge remembers of a child."""

    installed: dict[str, str]
    epoch: str

    def broken(self, problem: str) -> CandidateFailed: ...


def check_echo(child: Booked, side: str, echo: Echo | None) -> None:
    """Whatever answered (a window, a replay, a score) is what was installed there, on the weights that the child was given. Raises
    CandidateFailed, and the child is dead."""
    if echo is None:
        raise child.broken("an answer that does not say whose it is")
    expected = child.installed.get(side, AS_LOADED.id)
    if echo.candidate_id != expected:
        raise child.broken(f"{echo.candidate_id[:10]} answered on the side of {expected[:10]}")
    if echo.epoch != child.epoch:
        raise child.broken(f"the weights' epoch is {child.epoch[:10]}, but {echo.epoch[:10]} answered")


def answer_from_kv(
    child: Child, side: str, cut: int, row: int, tokens: np.ndarray, vocab: int, deadline: float
) -> np.ndarray | None:
    """As loaded's answer [1, num_seqs, vocab] to the last token of each sequence (`tokens`), on the KV that the side's last window of
    the row left. None where the model keeps no KV that another could read. Raises CandidateFailed."""
    child.out.poison(len(tokens) * vocab)
    body = {"side": side, "cut": cut, "row": row, "vocab": vocab}
    known = child.call_plain("answer_from_kv", body, deadline=deadline, blob=token_bytes(tokens))
    return child.out.taken((1, len(tokens), vocab)) if known else None
