"""Messages: whole, limited, and never more than data."""

from __future__ import annotations

import json
import os
import socket
import threading
import time

import pytest

from engines.wire import HEADER, MAGIC, Channel, ChannelClosed, ChannelTimeout, ProtocolBroken, channel_pair, encode
from hotpass.records.measurement import Failure, FailureKind


def pair(limit: int = 1 << 20, accepts_fds: bool = True) -> tuple[Channel, Channel]:
    return channel_pair(parent_limit=limit, parent_accepts_fds=accepts_fds, child_limit=1 << 24)


def soon() -> float:
    return time.monotonic() + 5.0


def test_records_blobs_and_descriptors_arrive() -> None:
    ours, theirs = pair()
    read, write = os.pipe()
    theirs.send("hello", {"failure": Failure(kind=FailureKind.CRASH, message="x"), "n": 3}, b"\x00\xffblob", [write])
    theirs.send("next", [1.5, None])
    message = ours.receive(soon())
    assert (message.kind, message.blob) == ("hello", b"\x00\xffblob")
    assert message.body == {"failure": {"kind": "crash", "message": "x", "detail": ""}, "n": 3}
    os.write(message.fds[0], b"through")
    assert os.read(read, 16) == b"through"
    assert ours.receive(soon()).body == [1.5, None]
    for fd in (read, write, *message.fds):
        os.close(fd)
    ours.close()
    theirs.close()


def test_a_large_message_arrives_in_pieces() -> None:
    ours, theirs = pair(limit=1 << 23)
    blob = bytes(range(256)) * 16384
    sender = threading.Thread(target=ours.send, args=("large", None, blob))
    sender.start()
    assert theirs.receive(soon()).blob == blob
    sender.join()
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a message"),
        (HEADER.pack(MAGIC, 1 << 30, 0, 0), "a message of"),
        (HEADER.pack(MAGIC, 3, 0, 0) + b"{a}", "not JSON"),
        (HEADER.pack(MAGIC, 11, 0, 0) + b'["ok", NaN]', "NaN is not JSON"),
        (HEADER.pack(MAGIC, 8, 0, 0) + b"[1,null]", "not a text"),
        (HEADER.pack(MAGIC, 100_000, 0, 0) + b"[" * 100_000, "not JSON"),
        (HEADER.pack(MAGIC, 9, 0, 2) + b'["ok", 1]', "2 descriptors announced"),
    ],
    ids=["noise", "too large", "no json", "nan", "kind", "deep", "descriptors"],
)
def test_what_is_no_message_is_refused(data: bytes, problem: str) -> None:
    ours, theirs = pair()
    theirs.sock.sendall(data)
    with pytest.raises(ProtocolBroken, match=problem):
        ours.receive(soon())
    ours.close()
    theirs.close()


def test_descriptors_that_are_not_wanted_do_not_stay_open() -> None:
    ours, theirs = pair(accepts_fds=False)
    read, write = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    theirs.send("flood", None, b"", [write] * 10)
    message = ours.receive(soon())
    assert message.fds == ()
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in (read, write):
        os.close(fd)
    ours.close()
    theirs.close()


def test_silence_ends_at_the_deadline_and_a_closed_end_at_once() -> None:
    ours, theirs = pair()
    with pytest.raises(ChannelTimeout):
        ours.receive(time.monotonic() - 1.0)
    theirs.sock.sendall(encode("cut short", "x")[:-1])
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive(soon())
    ours.close()


def test_a_dead_process_ends_the_wait_though_its_socket_is_held_open() -> None:
    ours, theirs = pair()
    pid = os.posix_spawn("/bin/true", ["true"], {})
    pidfd = os.pidfd_open(pid)
    with pytest.raises(ChannelClosed, match="the process ended"):
        ours.receive(soon(), watch=pidfd)
    os.waitpid(pid, 0)
    os.close(pidfd)
    theirs.send("late", None)
    assert ours.receive(soon()).kind == "late"
    ours.close()
    theirs.close()


def test_a_frame_is_header_json_blob() -> None:
    frame = encode("k", {"b": 1}, b"xyz")
    magic, json_length, blob_length, fds = HEADER.unpack(frame[: HEADER.size])
    assert (magic, blob_length, fds) == (MAGIC, 3, 0)
    assert json.loads(frame[HEADER.size : HEADER.size + json_length]) == ["k", {"b": 1}]
    assert frame.endswith(b"xyz")


def test_sending_to_nobody_is_a_closed_channel() -> None:
    ours, theirs = pair()
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.send("anyone", "there")
    ours.close()


def test_the_pair_is_a_unix_socket() -> None:
    ours, theirs = pair()
    assert ours.sock.family == theirs.sock.family == socket.AF_UNIX
    ours.close()
    theirs.close()
