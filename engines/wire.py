"""Messages between the processes of an engine: length-prefixed JSON, one block of raw bytes, and file descriptors.

    ┌ magic ┬ json length ┬ blob length ┬ fds ┐┌ kind + body as JSON ┐┌ blob ┐      descriptors beside the first byte (SCM_RIGHTS)

Nothing is ever unpickled: the judge reads what a candidate's process sends, and a pickle would run that process's code in the judge.
Sizes are limited by the reader. What is not here: what messages mean (`child`, `zygote`, `keeper`).
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotpass.decode import json_safe

HEADER = struct.Struct("!4sIIB")
MAGIC = b"HPW1"
MAX_FDS = 64
"""Descriptors beside one message; the kernel allows 253."""

REPLY_LIMIT = 1 << 20
"""Bytes that the judge takes from a child in one message (FAILURES R14)."""

REQUEST_LIMIT = 1 << 28
"""Bytes that a child takes from the judge: token ids of many requests."""


class ChannelClosed(Exception):
    """The other side closed, or died."""


class ChannelTimeout(Exception):
    """Nothing came by the deadline."""


class ProtocolBroken(Exception):
    """What came is not a message of this protocol, or is too large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    kind: str
    body: Any = None
    """Plain JSON value."""
    blob: bytes = b""
    fds: tuple[int, ...] = ()
    """Descriptors; the receiver owns and closes them."""


def encode(kind: str, body: object = None, blob: bytes = b"", num_fds: int = 0) -> bytes:
    """The bytes of a message (descriptors travel beside them). Records in `body` become plain values."""
    text = json.dumps([kind, json_safe(body)], separators=(",", ":"), allow_nan=False).encode()
    return HEADER.pack(MAGIC, len(text), len(blob), num_fds) + text + blob


class Channel:
    """One end of a Unix socket pair."""

    def __init__(self, sock: socket.socket, *, limit: int, accepts_fds: bool) -> None:
        """`limit`: largest message taken. With `accepts_fds` false, descriptors that come are dropped by the kernel."""
        self.sock = sock
        self.limit = limit
        self.accepts_fds = accepts_fds
        self._pending = b""
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: str, body: object = None, blob: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Raises ChannelClosed."""
        self.send_frame(encode(kind, body, blob, len(fds)), fds)

    def send_frame(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send what `encode` made. Raises ChannelClosed, or ChannelTimeout where the socket has a timeout."""
        try:
            sent = 0
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sent = self.sock.sendmsg([frame], rights)
            self.sock.sendall(memoryview(frame)[sent:])
        except TimeoutError:
            raise ChannelTimeout from None
        except ConnectionError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, deadline: float | None = None, watch: int | None = None) -> Message:
        """The next message; sleeps in poll until it comes.

        `deadline` is on `time.monotonic`'s clock. `watch` is a pidfd: once that process has ended and nothing is left to read, the
        channel counts as closed, even if a grandchild holds the other end. Raises ChannelClosed, ChannelTimeout, ProtocolBroken.
        """
        header = self._exactly(HEADER.size, deadline, watch)
        magic, json_length, blob_length, num_fds = HEADER.unpack(header)
        if magic != MAGIC or json_length + blob_length > self.limit:
            raise ProtocolBroken(
                "not a message" if magic != MAGIC else f"a message of {json_length + blob_length} bytes"
            )
        data = self._exactly(json_length + blob_length, deadline, watch)
        fds = tuple(self._fds) if self.accepts_fds else ()
        self._fds = []
        if self.accepts_fds and len(fds) != num_fds:
            close_all(fds)
            raise ProtocolBroken(f"{num_fds} descriptors announced, {len(fds)} came")
        try:
            kind, body = json.loads(data[:json_length], parse_constant=_refuse_constant)
        except (ValueError, TypeError, RecursionError) as error:
            close_all(fds)
            raise ProtocolBroken(f"not JSON of a kind and a body: {error}") from None
        if not isinstance(kind, str):
            close_all(fds)
            raise ProtocolBroken("the kind is not a text")
        return Message(kind=kind, body=body, blob=data[json_length:], fds=fds)

    def close(self) -> None:
        close_all(self._fds)
        self._fds = []
        self.sock.close()

    def _exactly(self, count: int, deadline: float | None, watch: int | None) -> bytes:
        if count == 0:
            return b""
        chunks: list[bytes] = []
        missing = count
        while missing:
            self._wait(deadline, watch)
            chunk = self._some(min(missing, 1 << 20))
            if not chunk:
                raise ChannelClosed("end of stream")
            chunks.append(chunk)
            missing -= len(chunk)
        return b"".join(chunks)

    def _some(self, count: int) -> bytes:
        try:
            if not self.accepts_fds:
                return self.sock.recv(count)
            data, ancillary, _, _ = self.sock.recvmsg(count, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return b""
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds += array.array("i", payload[: len(payload) - len(payload) % 4])
        return data

    def _wait(self, deadline: float | None, watch: int | None) -> None:
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        if watch is not None:
            poll.register(watch, select.POLLIN)
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise ChannelTimeout
            ready = dict(poll.poll(None if left is None else left * 1e3 + 1))
            if self.sock.fileno() in ready:
                return
            if ready:
                raise ChannelClosed("the process ended")


def channel_pair(*, parent_limit: int, parent_accepts_fds: bool, child_limit: int) -> tuple[Channel, Channel]:
    """(parent's end, child's end); the child's end takes descriptors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return (
        Channel(ours, limit=parent_limit, accepts_fds=parent_accepts_fds),
        Channel(theirs, limit=child_limit, accepts_fds=True),
    )


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
