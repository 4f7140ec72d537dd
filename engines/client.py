"""The judge's handle of one child: typed requests, deadlines, and what became of a child that did not answer.

Whatever a child does, a call ends by its deadline: with the reply, or with `CandidateFailed` and the record of how it failed. After a
crash, a timeout or a broken reply the child is dead, and `alive` is False.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from engines.limits import ChildLimits, written_output
from engines.memory import SharedBuffer, mapped_ranges
from engines.program import CandidateFailed
from engines.wire import ChannelClosed, ChannelTimeout, Message, ProtocolBroken, close_all, encode
from engines.zygote import Zygote
from hotpass.decode import DecodeError, from_plain
from hotpass.errors import EngineDied
from hotpass.records.measurement import Failure, FailureKind

T = TypeVar("T")

ENDING_MS = 3000
"""Between the closing of a dying process's socket and its end: its memory is taken down."""


class Child:
    """One child process and the buffer it writes logits into. Close it, or use it as a context manager."""

    def __init__(self, zygote: Zygote, program: str, limits: ChildLimits, out_floats: int) -> None:
        self._zygote = zygote
        self.out = SharedBuffer(out_floats)
        self._forked = zygote.fork(program, limits)
        self.pid = self._forked.pid
        self.alive = True
        self.installed: dict[str, str] = {}
        """Side → id of the candidate that was put there last; absent before the first install."""
        self.epoch = ""
        """Of the weights that it was given to load: the keeper's hash."""
        self.short_claims = 0
        """Windows in a row, of those in which it ran at all, of which it claimed less time than it ran."""
        self.phases_ms: dict[str, float] = {"fork": self._forked.fork_ms}
        hello = self._reply(time.monotonic() + 60.0)
        self.facts: Mapping[str, str] = {name: str(hello.body[name]) for name in ("network", "processes", "unconfined")}

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self, kind: str, body: object = None, *, deadline: float, blob: bytes = b"", fds: Sequence[int] = ()
    ) -> Message:
        """One request and its reply. `deadline` on time.monotonic's clock. Raises CandidateFailed."""
        self._send(encode(kind, body, blob, len(fds)), fds, deadline)
        return self._reply(deadline)

    def call_plain(
        self, kind: str, body: object = None, *, deadline: float, blob: bytes = b"", fds: Sequence[int] = ()
    ) -> Any:
        """As `call`, for replies without descriptors: the plain body."""
        message = self.call(kind, body, deadline=deadline, blob=blob, fds=fds)
        close_all(message.fds)
        return message.body

    def call_record(
        self, kind: str, body: object, record: type[T], *, deadline: float, blob: bytes = b"", fds: Sequence[int] = ()
    ) -> T:
        """As `call`, with the reply as a record of that type; a reply of another form is the child's failure."""
        return self.decoded(record, self.call_plain(kind, body, deadline=deadline, blob=blob, fds=fds))

    def timed_call(self, frame: bytes, *, deadline: float) -> tuple[Any, float]:
        """Send an encoded request; the plain reply and the seconds from request to reply by the judge's clock."""
        start = time.perf_counter()
        self._send(frame, (), deadline)
        message = self._reply(deadline)
        seconds = time.perf_counter() - start
        close_all(message.fds)
        return message.body, seconds

    def start(self, kind: str, body: object, *, deadline: float, blob: bytes = b"") -> None:
        """Send a request whose answer is several messages; read them with `next_message`."""
        self._send(encode(kind, body, blob), (), deadline)

    def next_message(self, deadline: float) -> Message:
        """The next message of a request that was started; kind `ok` is the last. Raises CandidateFailed."""
        return self._reply(deadline)

    def decoded(self, record: type[T], plain: Any) -> T:
        """A record out of a reply; a reply of another form kills the child, as everything that breaks the protocol."""
        try:
            return from_plain(record, plain)
        except DecodeError as error:
            raise self.broken(f"the reply is no {record.__name__}: {error}") from None

    def broken(self, problem: str) -> CandidateFailed:
        """End the child for an answer that is none; the failure to raise."""
        self._end()
        return CandidateFailed(Failure(kind=FailureKind.PROTOCOL, message=problem[:500]))

    def mappings(self, inodes: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Where the child maps these memory files, seen from outside. Empty tuples once it is dead."""
        try:
            return tuple(mapped_ranges(self.pid, inode) for inode in inodes)
        except OSError:
            return tuple(() for _ in inodes)

    def num_threads(self) -> int:
        """Threads of the child now, by the kernel's count; 0 once it is dead."""
        try:
            return len(os.listdir(f"/proc/{self.pid}/task"))
        except OSError:
            return 0

    def ran_seconds(self) -> float | None:
        """CPU time of its main thread, which runs the program, by the kernel's count; None where the kernel does not tell."""
        try:
            with open(f"/proc/{self.pid}/schedstat", encoding="ascii") as file:
                return int(file.read().split()[0]) / 1e9
        except (OSError, ValueError, IndexError):
            return None

    def kill(self) -> None:
        """End it now, whatever it does."""
        if self.alive:
            self._end()

    def close(self) -> None:
        """Kill it and release the socket, the output file and the buffer."""
        self.kill()
        self._forked.channel.close()
        self.out.close()
        close_all([self._forked.pidfd, self._forked.output_fd])
        self._forked.channel.close()

    def _send(self, frame: bytes, fds: Sequence[int], deadline: float) -> None:
        self._require_alive()
        self._forked.channel.sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            self._forked.channel.send_frame(frame, fds)
        except ChannelTimeout:
            raise self._timed_out() from None
        except ChannelClosed:
            raise self._crashed() from None

    def _reply(self, deadline: float) -> Message:
        self._require_alive()
        try:
            message = self._forked.channel.receive(deadline, watch=self._forked.pidfd)
        except ChannelTimeout:
            raise self._timed_out() from None
        except ProtocolBroken as error:
            raise self.broken(f"the child sent {error}") from None
        except ChannelClosed:
            raise self._crashed() from None
        if message.kind == "failed":
            close_all(message.fds)
            raise CandidateFailed(self.decoded(Failure, message.body))
        if message.kind not in ("ok", "step", "hello"):
            close_all(message.fds)
            raise self.broken(f"the child sent a message of kind {message.kind[:40]!r}")
        return message

    def _require_alive(self) -> None:
        if not self.alive:
            raise CandidateFailed(Failure(kind=FailureKind.CRASH, message="the child is dead"))

    def _timed_out(self) -> CandidateFailed:
        self._end()
        detail = written_output(self._forked.output_fd)
        return CandidateFailed(Failure(kind=FailureKind.TIMEOUT, message="no reply by the deadline", detail=detail))

    def _crashed(self) -> CandidateFailed:
        """The socket closed. The process is ending, or has closed it and lives on."""
        ending = select.poll()
        ending.register(self._forked.pidfd, select.POLLIN)
        if not ending.poll(ENDING_MS):
            return self.broken("the child closed its socket")
        self.alive = False
        status = self._zygote.status(self.pid)
        detail = written_output(self._forked.output_fd)
        return CandidateFailed(Failure(kind=FailureKind.CRASH, message=_how_it_ended(status), detail=detail))

    def _end(self) -> None:
        self.alive = False
        with contextlib.suppress(EngineDied):  # a dead zygote has taken its children with it
            self._zygote.end(self.pid)


def token_bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as they travel: little-endian int64."""
    return np.ascontiguousarray(tokens, dtype="<i8").tobytes()


def _how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name
        hint = " (not by the judge: perhaps the machine ran out of memory)" if number == signal.SIGKILL else ""
        return f"the child was ended by {name}{hint}"
    return f"the child exited with status {os.WEXITSTATUS(status)}"
