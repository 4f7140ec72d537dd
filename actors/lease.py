"""The measuring lease: at most one measurement at a time in a memory-bandwidth domain, whatever campaigns run on the machine.

A file lock on the node itself, so that it holds between Ray clusters and plain processes alike, and is free again when its
holder dies. The holder writes its process id and what it is into the file, for whoever waits meanwhile (`holder_of`).

    wait at the turnstile ─► in it, wait for the lease ─► hold the lease, turnstile free for the next

One waiter stands in the turnstile, so whoever has just given the lease back comes after it: an engine that measures without a pause
cannot keep a local LLM or a quick check waiting for ever, nor they it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path
from types import TracebackType

from hotpass.errors import MachineError

POLL_SECONDS = 0.05


def lease_folder() -> Path:
    """`HOTPASS_LEASE_DIR`, or a folder of the machine that every user may write."""
    folder = Path(os.environ.get("HOTPASS_LEASE_DIR") or Path(tempfile.gettempdir()) / "hotpass-leases")
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o1777)
    return folder


class MeasuringLease:
    """`with MeasuringLease("cpu") as lease:` measure; `lease.wait_seconds` says how long others held it."""

    def __init__(self, domain: str, *, patience_seconds: float = 600.0, holder: str = "") -> None:
        """`holder`: what takes it, in words, as `decoder-0 of campaigns/x`."""
        self.path = _path_of(domain)
        self.holder = holder
        self.turnstile = self.path.with_suffix(".next")
        self.patience_seconds = patience_seconds
        self.wait_seconds = 0.0
        self._descriptor = -1

    def __enter__(self) -> MeasuringLease:
        """Raises MachineError naming the holder when it does not give up the lease in time."""
        started = time.monotonic()
        turnstile = self._lock(self.turnstile, started)
        try:
            self._descriptor = self._lock(self.path, started)
        finally:
            os.close(turnstile)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()} {self.holder}".strip().encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _lock(self, path: Path, started: float) -> int:
        """The file, open and locked. Raises MachineError when patience ends."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while not _locked(descriptor):
                self.wait_seconds = time.monotonic() - started
                if self.wait_seconds > self.patience_seconds:
                    raise MachineError(
                        f"{_named(self.path)} has held the measuring lease {self.path} for more than "
                        f"{self.patience_seconds:.0f} s; end it, or wait for it to finish"
                    )
                time.sleep(POLL_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def holder_of(domain: str) -> str:
    """Who holds the lease of a domain on this node now, as `process 4242 (decoder-0 of campaigns/x)`; empty while nobody does."""
    path = _path_of(domain)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:  # one that was killed left its name, but not its lock
        return "" if _locked(descriptor, fcntl.LOCK_SH) else _named(path)
    finally:
        os.close(descriptor)


def _path_of(domain: str) -> Path:
    return lease_folder() / f"{domain.replace('/', '_')}.lock"


def _named(path: Path) -> str:
    pid, _, what = path.read_text(errors="replace").strip().partition(" ")
    return f"process {pid or 'unknown'}" + (f" ({what})" if what else "")


def _locked(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
