"""The totally ordered event log of a campaign: the one place where anything is remembered.

    append ──► one JSON line ──► operating system        (visible to readers, not yet acknowledged)
    sync   ──► fsync, one for all lines that wait        (durable: acknowledged)

One writer at a time holds the log; any number of processes read it while it grows. What is not here: what the payloads
mean (the records do that), and MLflow (`cluster.ledger` mirrors the log into it, from behind).

Guarantees, and what they rest on:
* `seq` counts 1, 2, 3, … without a gap. A reader that meets a gap raises; it never skips.
* After `sync` returns, every event appended before it survives a kill of the process and a loss of power.
* A line torn by a crash was never acknowledged. The next `open` moves it to `quarantine/` and says so.
* A full disk raises LedgerError; the half-written line is taken back, and the log goes on once there is room.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hotpass.decode import json_safe
from hotpass.errors import InputError, LedgerError

SCHEMA_VERSION = 1

KINDS = ("proposal", "prediction", "assignment", "lease", "attempt", "measurement", "post", "reply", "decision")
"""What an event may be. A feature that needs another one adds it here; there is no second store."""

SEGMENT_BYTES = 64 * 1024 * 1024
"""A segment that has grown beyond this is closed, so that no file of a long campaign becomes unwieldy."""

_KEYS = frozenset(("seq", "time", "schema_version", "kind", "payload"))
TAIL_BYTES = 4 * 1024 * 1024
"""Of a segment, among which its last whole event is looked for: no line is longer."""

_open_here: set[str] = set()
"""Folders that this process writes: record locks of the operating system do not see a second open by the same process."""
_open_here_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of the log."""

    seq: int
    """1 for the first event of the campaign."""
    time: float
    """Seconds since 1970 by the writer's clock when it was appended."""
    schema_version: int
    kind: str
    """One of `KINDS`."""
    payload: dict[str, Any]
    """Plain values; `hotpass.decode.from_plain` makes records of them."""


class EventLog:
    """The writing end. Made by `EventLog.open`; safe to share between threads; not usable after a fork."""

    def __init__(self, folder: Path, lock_fd: int, clock: Callable[[], float], segment_bytes: int) -> None:
        self.folder = folder
        self.quarantined: tuple[Path, ...] = ()
        """Files that `open` moved torn lines to; empty after a clean end."""
        self._lock_fd = lock_fd
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._pid = os.getpid()
        self._append_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._broken = ""
        self._segment = 1
        self._size = 0
        self._last_seq = 0
        self._synced_seq = 0
        self._fd = -1

    @classmethod
    def open(
        cls, folder: Path, *, clock: Callable[[], float] = time.time, segment_bytes: int = SEGMENT_BYTES
    ) -> EventLog:
        """The log in `folder`, made if need be, for writing.

        Raises InputError when another process writes it (naming that process), LedgerError when it is damaged before its end.
        """
        folder = Path(folder)
        try:
            (folder / "quarantine").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(f"the event log {folder} cannot be made: {error.strerror}") from error
        log = cls(folder, _take_lock(folder), clock, segment_bytes)
        try:
            log._recover()
        except BaseException:
            log.close()
            raise
        return log

    @property
    def last_seq(self) -> int:
        """Of the last event appended; 0 for an empty log."""
        return self._last_seq

    @property
    def synced_seq(self) -> int:
        """Of the last event known to be durable."""
        return self._synced_seq

    def append(self, kind: str, payload: object) -> int:
        """Add one event (a record or a mapping of plain values and records), and return its seq.

        It is durable only after `sync`. Raises ValueError for an unknown kind, TypeError for what is not a mapping,
        LedgerError when the disk refuses; then nothing was added.
        """
        plain = json_safe(payload)
        if not isinstance(plain, dict):
            raise TypeError(f"the payload of an event is a record or a mapping, not {type(payload).__name__}")
        return self.append_plain(kind, plain)

    def append_plain(self, kind: str, plain: dict[str, Any]) -> int:
        """The same for a payload that `json_safe` made already."""
        if kind not in KINDS:
            raise ValueError(f"event kind {kind!r} is not one of {KINDS}")
        with self._append_lock:
            self._check_usable()
            event = {
                "seq": self._last_seq + 1,
                "time": self._clock(),
                "schema_version": SCHEMA_VERSION,
                "kind": kind,
                "payload": plain,
            }
            line = json.dumps(event, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
            if self._size and self._size + len(line) > self._segment_bytes:
                self._rotate()
            self._write(line)
            self._last_seq += 1
            return self._last_seq

    def sync(self) -> None:
        """Make every event appended so far durable. Calls that wait for a running fsync share the next one."""
        wanted = self._last_seq
        with self._sync_lock:
            if self._synced_seq >= wanted:
                return
            self._check_usable()
            with self._append_lock:
                fd, reached = self._fd, self._last_seq
            try:
                os.fsync(fd)
            except OSError as error:
                # After a failed fsync the system may drop the pages and report success next time, so this log is done.
                self._broken = f"fsync failed: {error.strerror}"
                raise LedgerError(f"the event log {self.folder} cannot be made durable: {error.strerror}") from error
            self._synced_seq = max(self._synced_seq, reached)

    def append_durable(self, kind: str, payload: object) -> int:
        """`append` and `sync`: when it returns, the event is acknowledged."""
        seq = self.append(kind, payload)
        self.sync()
        return seq

    def read(self, after: int = 0) -> Iterator[Event]:
        """Events with `seq > after`, in order, up to what was appended when the reading began."""
        last = self._last_seq
        for event in read_events(self.folder, after):
            if event.seq > last:
                return
            yield event

    def close(self) -> None:
        """Make everything durable and let the lock go. A second call does nothing."""
        if self._lock_fd < 0:
            return
        try:
            if self._fd >= 0 and not self._broken and os.getpid() == self._pid:
                self.sync()
        finally:
            for fd in (self._fd, self._lock_fd):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._lock_fd = -1
            with _open_here_lock:
                _open_here.discard(str(self.folder.resolve()))

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._lock_fd < 0:
            raise LedgerError(f"the event log {self.folder} is closed")
        if os.getpid() != self._pid:
            raise LedgerError(
                f"the event log {self.folder} belongs to process {self._pid}, not to its fork {os.getpid()}"
            )
        if self._broken:
            raise LedgerError(f"the event log {self.folder} takes no more events ({self._broken}); open it again")

    def _write(self, line: bytes) -> None:
        written = 0
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError as error:
            self._take_back()
            room = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
            raise LedgerError(
                f"the event log {self.folder} cannot take an event: {room}; the {self._last_seq} events before it are kept"
            ) from error
        self._size += len(line)

    def _take_back(self) -> None:
        """The file as it was before the failed write."""
        try:
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            self._broken = f"a torn line could not be taken back: {error.strerror}"

    def _rotate(self) -> None:
        """Close this segment for good (durably, before the next one exists) and go on in a new one."""
        try:
            os.fsync(self._fd)
            fd = _open_segment(self.folder, self._segment + 1)
        except OSError as error:
            raise LedgerError(f"the event log {self.folder} cannot begin a segment: {error.strerror}") from error
        # `sync` may be inside fsync of the old descriptor: give the number to the new file instead of closing under it.
        os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)
        self._segment += 1
        self._size = 0

    def _recover(self) -> None:
        """Find the end of the log, and put a torn last line aside."""
        segments = _segments(self.folder)
        moved: list[Path] = []
        for path in reversed(segments):
            good_bytes, last_seq, torn = _end_of(path)
            if torn:
                moved.append(_quarantine(self.folder, path, good_bytes, torn))
            if last_seq:
                self._last_seq = last_seq
                break
        self.quarantined = tuple(moved)
        self._segment = int(segments[-1].stem) if segments else 1
        try:
            self._fd = _open_segment(self.folder, self._segment)
            self._size = os.fstat(self._fd).st_size
            os.fsync(self._fd)
        except OSError as error:
            raise LedgerError(f"the event log {self.folder} cannot be opened: {error.strerror}") from error
        self._synced_seq = self._last_seq


class EventReader:
    """The reading end for one that follows a growing log: each `poll` returns what is new. Takes no lock."""

    def __init__(self, folder: Path, after: int = 0, passes_over: re.Pattern[bytes] | None = None) -> None:
        """`passes_over`: lines that begin so are counted and not looked into; its first group is their seq."""
        self.folder = Path(folder)
        self.last_seq = after
        """Of the last event returned, or passed over."""
        self._passes_over = passes_over
        self._segment = _segment_holding(self.folder, after + 1)
        self._offset = 0
        self._seq_at_offset: int | None = None

    def poll(self, limit: int | None = None, upto: int | None = None) -> list[Event]:
        """New complete events, at most `limit`, none with `seq > upto`. Raises LedgerError for a gap or a damaged line."""
        found: list[Event] = []
        while limit is None or len(found) < limit:
            # Whether a later segment exists is asked before reading: what is in this one is then complete.
            is_closed = _segment_path(self.folder, self._segment + 1).exists()
            at_end = self._read_segment(found, limit, upto)
            if not at_end or not is_closed:
                break
            self._segment, self._offset = self._segment + 1, 0
        return found

    def _read_segment(self, found: list[Event], limit: int | None, upto: int | None) -> bool:
        """Append what this segment has; True when all its complete lines are read."""
        try:
            file = _segment_path(self.folder, self._segment).open("rb")
        except FileNotFoundError:
            return True
        with file:
            file.seek(self._offset)
            while limit is None or len(found) < limit:
                line = file.readline()
                if not line.endswith(b"\n"):
                    return True
                passed = self._passes_over.match(line) if self._passes_over else None
                event = _parse(line) if passed is None else None
                if event is None and passed is None:
                    raise LedgerError(
                        f"{file.name} is damaged at byte {self._offset}; the events after it are not read"
                    )
                seq = event.seq if event is not None else int(passed[1])  # type: ignore[index]
                if self._seq_at_offset is not None and seq != self._seq_at_offset + 1:
                    raise LedgerError(f"{file.name} has event {seq} after {self._seq_at_offset}: events are missing")
                if upto is not None and seq > upto:
                    return False
                self._offset += len(line)
                self._seq_at_offset = seq
                if seq > self.last_seq:
                    self.last_seq = seq
                    found += [event] if event is not None else []
            return False


def read_events(folder: Path, after: int = 0) -> Iterator[Event]:
    """Every complete event with `seq > after`, in order; an unfinished last line is left out. Takes no lock."""
    reader = EventReader(folder, after)
    while events := reader.poll(limit=256):
        yield from events


def last_seq_of(folder: Path) -> int:
    """Of the last complete event; 0 for an empty log. Takes no lock, and reads the end only."""
    for path in reversed(_segments(folder)):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
        found = next((event for line in reversed(lines) if (event := _parse(line)) is not None), None)
        if found is not None:
            return found.seq
    return 0


def writer_of(folder: Path) -> int | None:
    """The process that holds the log for writing, or None when nobody does."""
    with _open_here_lock:
        if str(Path(folder).resolve()) in _open_here:
            return os.getpid()
    try:
        fd = os.open(Path(folder) / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except OSError:
        return _pid_in(fd)
    finally:
        os.close(fd)


def _take_lock(folder: Path) -> int:
    key = str(folder.resolve())
    with _open_here_lock:
        if key in _open_here:
            raise InputError(
                "campaign", folder, f"is already written by this process ({os.getpid()})", "close it first"
            )
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # A record lock: it ends with this process however that dies, and a forked child does not keep it alive.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = _pid_in(fd)
            os.close(fd)
            raise InputError(
                "campaign", folder, f"is being written by process {pid}", "wait for it or stop it first"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        _open_here.add(key)
        return fd


def _pid_in(fd: int) -> int:
    text = os.pread(fd, 32, 0).decode("ascii", "replace")
    return int(text) if text.isdigit() else 0


def _segments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.jsonl") if path.stem.isdigit())


def _segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.jsonl"


def _open_segment(folder: Path, number: int) -> int:
    """Open for appending; the name itself is made durable too."""
    fd = os.open(_segment_path(folder, number), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return fd


def _segment_holding(folder: Path, seq: int) -> int:
    """Number of the last segment that begins at or before `seq`; the first one of the folder when none does."""
    holding = None
    segments = _segments(folder)
    for path in segments:
        with path.open("rb") as file:
            first = _parse(file.readline())
        if first is not None and first.seq <= seq:
            holding = int(path.stem)
    return holding or (int(segments[0].stem) if segments else 1)


def _parse(line: bytes) -> Event | None:
    """The event of one complete line, or None when it is not one."""
    if not line.endswith(b"\n"):
        return None
    with contextlib.suppress(ValueError):
        plain = json.loads(line.decode())
        if isinstance(plain, dict) and plain.keys() == _KEYS:
            if plain["schema_version"] > SCHEMA_VERSION:
                raise LedgerError(
                    f"event {plain['seq']} has schema version {plain['schema_version']}, this hotpass reads {SCHEMA_VERSION}"
                )
            return Event(**plain)
    return None


def _end_of(path: Path) -> tuple[int, int, bytes]:
    """Bytes of whole events, seq of the last, and what follows them. Raises LedgerError when good events follow bad bytes."""
    data = path.read_bytes()
    good, last_seq = 0, 0
    for line in data.splitlines(keepends=True):
        event = _parse(line)
        if event is None:
            break
        good, last_seq = good + len(line), event.seq
    rest = data[good:]
    if any(_parse(line) for line in rest.splitlines(keepends=True)):
        raise LedgerError(f"{path} is damaged at byte {good}, and events follow; restore the file from a copy")
    return good, last_seq, rest


def _quarantine(folder: Path, path: Path, good_bytes: int, torn: bytes) -> Path:
    target = folder / "quarantine" / f"{path.stem}-{good_bytes}.torn"
    try:
        target.write_bytes(torn)
        os.truncate(path, good_bytes)
    except OSError as error:
        raise LedgerError(f"the torn end of {path} cannot be put aside: {error.strerror}") from error
    return target
