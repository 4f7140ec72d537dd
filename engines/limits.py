"""What a child may use, and how the kernel is told: session, limits, network, death of the parent, environment, output.

Called in a freshly forked child, before any code of a candidate. What a kernel or a container does not permit is reported in the
result, never silently left out. What is not here: a process namespace; cgroups (`engines.processes`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildLimits:
    """Limits of one child process."""

    memory_bytes: int = 0
    """Private writable memory (RLIMIT_DATA; shared weights do not count); 0 leaves it unlimited."""
    file_bytes: int = 1 << 28
    """Largest file that it may write; 0 leaves it unlimited."""
    open_files: int = 1024
    extra_processes: int = 512
    """Processes and threads: of the child in a pids cgroup, else beyond those that its user has now (`engines.processes`)."""
    output_bytes: int = 1 << 20
    """Of stdout and stderr together; what is written beyond that is lost."""
    network: bool = False
    """False: a network namespace of its own, without any interface up."""
    confined: bool = True
    """Writes only below its folder, and no view of other processes' memory (`engines.confine`)."""


def apply_limits(limits: ChildLimits) -> None:
    """Resource limits of the calling process."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, limits.open_files)
    if os.getuid() != 0:
        _lower(resource.RLIMIT_NPROC, _tasks_of_user(os.getuid()) + limits.extra_processes)
    if limits.file_bytes:
        _lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    if limits.memory_bytes:
        _lower(resource.RLIMIT_DATA, limits.memory_bytes)


def leave_network() -> str:
    """Move the calling (single-threaded) process into an empty network namespace. Returns "" or why it could not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) == 0:
        return ""
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return f"network namespace not permitted ({os.strerror(ctypes.get_errno())})"
    # Own ids map to themselves: an unmapped user could not create files.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return ""


def die_with_parent(parent: int) -> None:
    """SIGKILL when the parent (single-threaded) dies; at once when it is already gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Descendants whose parent died become children of this process, so that it can end them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def close_other_files(keep: Sequence[int]) -> None:
    """Close every descriptor but those."""
    start = 0
    for fd in [*sorted(keep), os.sysconf("SC_OPEN_MAX")]:
        if fd > start:
            os.closerange(start, fd)
        start = fd + 1


def reset_signals() -> None:
    """Default handlers, nothing blocked; SIGXFSZ and SIGPIPE become errors of the call, as Python has it."""
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGXFSZ, signal.SIGPIPE):
            continue
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # reserved by the C library
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def replace_environment(values: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


class CappedOutput:
    """Standard output of a child: a file of fixed size, and silence beyond it."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # full: by design of the limit
            os.write(self._stream.fileno(), text.encode(errors="replace"))
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._stream.fileno()


def output_file(num_bytes: int) -> int:
    """A memory file of fixed size for a child's stdout and stderr."""
    import fcntl

    fd = os.memfd_create("hotpass-output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def written_output(fd: int, tail: int = 2000) -> str:
    """The end of what a child wrote so far."""
    end = os.lseek(fd, 0, os.SEEK_CUR)
    return os.pread(fd, tail, max(0, end - tail)).decode(errors="replace").strip("\0 \n")


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))


def _tasks_of_user(uid: int) -> int:
    count = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid == uid:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:
            continue  # ended meanwhile
    return count
