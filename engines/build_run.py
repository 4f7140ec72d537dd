"""One build step as a process: own session, low priority, limits, a deadline, and the tail of what it printed.

    caller ── exec ──► sh (ulimit) ── exec ──► nice ── exec ──► the command and what it starts: one group, killed as one

What is not here: judging the command, and namespaces (a worker that runs a candidate's code leaves the network itself).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.program import CandidateFailed
from hotpass.records.measurement import Failure, FailureKind

DETAIL_CHARS = 4000
"""Of a build's output that are kept: the last ones."""

_LAUNCH = """exec 3<&0 </dev/null
{ read -r _; kill -9 -$$; } <&3 >/dev/null 2>&1 &
exec 3<&-
ulimit -c 0; ulimit -f "$1"; ulimit -v "$2"; ulimit -t "$3"; shift 3; exec nice -n 10 "$@"
"""
"""The shell's own input is a pipe that nobody writes to: when the caller ends, however it ends, the whole group is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """How a build step ended."""

    returncode: int
    """Negative: the signal that ended it."""
    output: str
    """The tail of stdout and stderr together."""
    timed_out: bool
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildLimits:
    """What a build step may use."""

    memory_bytes: int
    """Address space of each of its processes."""
    file_bytes: int
    """Largest file that it may write."""


def run_limited(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    deadline_seconds: float,
    limits: BuildLimits,
) -> Finished:
    """Run a command in the folder until it ends or the deadline, then kill whatever is left of its group."""
    cpu_seconds = max(1, int(deadline_seconds * (os.cpu_count() or 1)))
    launch = ["/bin/sh", "-c", _LAUNCH, "sh", str(-(-limits.file_bytes // 512)), str(limits.memory_bytes // 1024)]
    start = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*launch, str(cpu_seconds), *command],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=max(0.0, deadline_seconds))
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        log.seek(max(0, log.seek(0, os.SEEK_END) - 4 * DETAIL_CHARS))
        output = log.read().decode(errors="replace")[-DETAIL_CHARS:]
    return Finished(returncode=process.returncode, output=output, timed_out=timed_out, seconds=time.monotonic() - start)


def build_failed(message: str, detail: str = "", kind: FailureKind = FailureKind.BUILD) -> CandidateFailed:
    """The exception that carries a candidate's failure to build."""
    return CandidateFailed(Failure(kind=kind, message=message[:500], detail=detail[-DETAIL_CHARS:]))


def deadline_failed(what: str, seconds: float) -> CandidateFailed:
    """Building took all the time that the candidate had."""
    return build_failed(f"{what} had not ended after {seconds:.0f} s", kind=FailureKind.TIMEOUT)
