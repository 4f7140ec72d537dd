"""One measurement at a time on a machine, whoever asks; a dead holder holds nothing."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from actors.lease import MeasuringLease, holder_of
from hotpass.errors import MachineError

HOLDER = """
import sys
from actors.lease import MeasuringLease
with MeasuringLease("cpu"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTPASS_LEASE_DIR", str(tmp_path / "leases"))


def holder() -> subprocess.Popen[str]:
    """Another process that holds the lease until its stdin closes or it dies."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_held_lease_is_refused_by_name_of_its_holder() -> None:
    other = holder()
    with pytest.raises(MachineError, match=f"process {other.pid} has held the measuring lease"):
        MeasuringLease("cpu", patience_seconds=0.0).__enter__()
    other.communicate("")


def test_a_lease_is_free_when_its_holder_is_killed() -> None:
    other = holder()
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert other.stdin is not None
    other.stdin.close()
    with MeasuringLease("cpu", patience_seconds=5.0) as lease:
        assert lease.path.read_text() == str(os.getpid())
    assert lease.path.read_text() == ""


def test_other_domains_are_measured_meanwhile() -> None:
    with MeasuringLease("cpu"), MeasuringLease("cuda0", patience_seconds=0.0) as other:
        assert other.wait_seconds == 0.0


def test_who_has_just_measured_comes_after_who_waits() -> None:
    order: list[str] = []

    def wait_for_it() -> None:
        with MeasuringLease("cpu", patience_seconds=60.0):
            order.append("waiter")

    waiter = threading.Thread(target=wait_for_it)
    with MeasuringLease("cpu") as lease:
        order.append("engine")
        waiter.start()
        while is_free(lease.turnstile):
            waiter.join(0.01)
    with MeasuringLease("cpu", patience_seconds=60.0):
        order.append("engine again")
    waiter.join(60)
    assert order == ["engine", "waiter", "engine again"]


def is_free(path: Path) -> bool:
    """Whether nobody holds the file."""
    if not path.exists():
        return True
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_who_holds_it_is_told_to_those_who_wait() -> None:
    assert holder_of("cpu") == ""
    with MeasuringLease("cpu", holder="decoder-0 of campaigns/x"):
        assert holder_of("cpu") == f"process {os.getpid()} (decoder-0 of campaigns/x)"
        with pytest.raises(MachineError, match=r"\(decoder-0 of campaigns/x\) has held the measuring lease"):
            MeasuringLease("cpu", patience_seconds=0.0).__enter__()
    assert holder_of("cpu") == ""


def test_the_name_of_a_killed_holder_is_not_told() -> None:
    other = holder()
    assert holder_of("cpu") == f"process {other.pid}"
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert other.stdin is not None
    other.stdin.close()
    assert holder_of("cpu") == ""
