"""Temporary folders that are in use for as long as a process holds them, and are removed once none does.

    made ── flock on the folder itself ──► in use          closed ──► removed
    maker killed ── the kernel drops the lock ──► removed by a process that outlives it, or by the next maker of such a folder

A lock tells the living from the dead where a pid cannot (pids come again, and other namespaces have their own). Where a file system
knows no locks nothing is ever taken for abandoned.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

ENGINE = "hotpass-engine-"
"""Prefix of the folders of engines."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


class HeldFolder:
    """A new folder of this process; as a context manager its path."""

    def __init__(self, prefix: str, parent: Path | str | None = None) -> None:
        """In `parent`, by default the folder for temporary files. Abandoned ones of the same prefix there are removed first. Raises
        OSError where no folder can be made."""
        room = Path(parent or tempfile.gettempdir())
        remove_abandoned(prefix, room)
        while True:  # another maker may take a folder for abandoned before it is locked
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=room))
            held = _held(self.path, without_locks=True)
            if held is not None:
                break
        self._fd = held

    def close(self) -> None:
        """Remove it with all that is in it."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_abandoned(prefix: str, room: Path) -> None:
    """Remove this user's folders of that prefix in the room that no process holds."""
    for folder in room.glob(f"{prefix}*"):
        remove_if_abandoned(folder)


def remove_if_abandoned(folder: Path) -> bool:
    """Whether nobody held it: then it is gone, as far as this process may remove it."""
    held = _held(folder)
    if held is None:
        return False
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)
    return True


def _held(folder: Path, *, without_locks: bool = False) -> int | None:
    """A descriptor that locks the folder, this user's own and no link; None where that is another process's, or it is gone.

    `without_locks`: whether a folder where locks are unknown is given, too.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.stat(folder, follow_symlinks=False)
        if there.st_uid == os.getuid() and os.path.samestat(there, os.fstat(fd)):
            return fd
    except OSError as error:
        if without_locks and error.errno in _NO_LOCKS:
            return fd
    os.close(fd)
    return None
