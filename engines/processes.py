"""A ceiling on the processes and threads of one child, and an end to all of them at once.

    pids cgroup (writable here)  ──► the kernel refuses the next fork; ended: no fork any more, then everything in it is killed
    RLIMIT_NPROC (not for root)  ──► the kernel refuses the next fork (`engines.limits`)
    neither                      ──► the zygote looks at the machine's count of tasks ten times a second, and kills the child

What is not here: a limit where a child is only watched. A fork bomb then has up to a tenth of a second before it is seen, and takes
whatever the kernel's own maxima leave it in that time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

WATCH_MS = 100
"""Between two looks at the machine's tasks, where nothing else limits a child."""
STALE_SECONDS = 60.0
"""A group so old whose zygote is gone was left by a killed one."""
_ROUNDS = 1000
"""Of reading and killing: with no fork permitted the second round finds nothing."""

_serial = itertools.count()


class PidsGroup:
    """A cgroup with a ceiling on tasks. Made by the zygote, entered by the child before any code of a candidate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def new(most: int) -> PidsGroup | None:
        """A group for one child and at most so many tasks; None where this process may not make one."""
        base = _base()
        if base is None:
            return None
        _sweep(base)
        group = PidsGroup(base / f"hotpass-{os.getpid()}-{next(_serial)}")
        try:
            group._folder.mkdir()
            (group._folder / "pids.max").write_text(str(most))
            if os.access(group._folder / "cgroup.procs", os.W_OK):
                return group
        except OSError:
            pass
        group.remove()
        return None

    def enter(self) -> None:
        """Move the calling process into it, with all that it will start."""
        (self._folder / "cgroup.procs").write_text("0")

    def end(self) -> None:
        """Kill everything in it, however fast it multiplies."""
        with contextlib.suppress(OSError):
            (self._folder / "pids.max").write_text("0")
        for _ in range(_ROUNDS):
            pids = self.pids()
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Processes in it that have not ended."""
        try:
            return [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split() if pid != "0"]
        except OSError:
            return []

    def remove(self) -> None:
        """Once what was in it has been waited for; the next group's making tries again where the kernel is not ready yet."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def ceiling(group: PidsGroup | None, most: int) -> str:
    """What holds a child's processes, in words."""
    if group is not None:
        return f"at most {most} (pids cgroup)"
    if os.getuid() != 0:
        return f"at most {most} more (RLIMIT_NPROC)"
    return f"watched, ended beyond {most} (no pids cgroup may be made here, and RLIMIT_NPROC does not bind root)"


class Watch:
    """On a child that no kernel limits: the machine's count of tasks is one small read, the child's own is counted when that has grown."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._alarm = _tasks_of_the_machine() + most

    def has_too_many(self, child: int, known: Container[int]) -> bool:
        """Whether it has, by its own count. `known`: children of the calling process; others that it has were left by one of them."""
        if _tasks_of_the_machine() <= self._alarm:
            return False
        below = _children_by_parent()
        orphans = [pid for pid in below.get(os.getpid(), ()) if pid not in known]
        if _count([child, *orphans], below) > self._most:
            return True
        self._alarm = _tasks_of_the_machine() + self._most  # somebody else's
        return False


def _tasks_of_the_machine() -> int:
    """Processes and threads that exist now."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def _children_by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile
                stat = Path(entry.path, "stat").read_text()
                found[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    return found


def _count(roots: Iterable[int], below: Mapping[int, Sequence[int]]) -> int:
    """Processes in the trees of these."""
    pending, count = list(roots), 0
    while pending:
        count += 1
        pending += below.get(pending.pop(), ())
    return count


def _base() -> Path | None:
    """The folder in which this process may make pids cgroups: its own group's, in either version of the interface."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return None
    own = {name: path for _, names, path in lines for name in names.split(",")}
    for mounted, source in mounts:
        kind, _, options = source.split(" ", 2)
        point = Path(mounted.split(" ")[4])
        if kind == "cgroup" and "pids" in options.split(","):
            return _within(point, own.get("pids", "/"))
        if kind == "cgroup2" and _hands_on_pids(_within(point, own.get("", "/"))):
            return _within(point, own.get("", "/"))
    return None


def _hands_on_pids(base: Path) -> bool:
    """Whether groups below it have the pids controller."""
    try:
        return "pids" in (base / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _within(point: Path, path: str) -> Path:
    """The group's folder, or the mount itself where a namespace hides the path."""
    folder = point / path.lstrip("/")
    return folder if folder.is_dir() else point


def _sweep(base: Path) -> None:
    """Empty groups whose zygote was killed before it could remove them."""
    for folder in base.glob("hotpass-*-*"):
        owner = folder.name.split("-")[1]
        with contextlib.suppress(OSError):
            if not Path("/proc", owner).exists() and time.time() - folder.stat().st_mtime > STALE_SECONDS:
                folder.rmdir()
