"""One measurement at a time on a machine, whoever asks; a dead holder holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.lease import MeasuringLease
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
