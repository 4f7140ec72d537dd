"""Folders on disk that are made once, whole or not at all, by whichever process comes first.

    cache/<room>/<key>/        appears by one rename, complete
    cache/<room>/.<key>.<pid>  being made; left by a killed process, removed by the next maker
    cache/<room>/.<key>.lock   an fcntl lock: the kernel drops it with its process, so no build can be blocked by a dead one

What is not here: what is in the folders, and whether an existing one is still right (the `ready` given by the caller).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hotpass.errors import MachineError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def cache_root(cache_dir: Path | str | None = None) -> Path:
    """The cache: the argument, else HOTPASS_CACHE, else ~/.cache/hotpass."""
    return (
        Path(cache_dir or os.environ.get("HOTPASS_CACHE") or Path.home() / ".cache" / "hotpass").expanduser().absolute()
    )


def make_once(folder: Path, *, ready: Callable[[Path], bool], make: Callable[[Path], None]) -> Path:
    """Return the folder, made by `make(temporary folder)` unless it is there and `ready(folder)` says so.

    Other processes wait for the one that makes. A folder that is not ready is replaced. Whatever `make` raises leaves
    nothing behind; a full or unwritable disk is a MachineError.
    """
    if folder.is_dir() and ready(folder):
        return folder
    with machine_errors(folder), _locked(folder):
        if folder.is_dir() and ready(folder):
            return folder
        for leftover in folder.parent.glob(f".{folder.name}.*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        temporary.mkdir()
        try:
            make(temporary)
            _flush(temporary)
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextmanager
def machine_errors(where: Path) -> Iterator[None]:
    """Turn a disk that is full or cannot be written into a MachineError that says where."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise MachineError(
                f"no space left while writing to {where.parent}; free some, or set HOTPASS_CACHE to another disk"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise MachineError(f"{where.parent} cannot be written ({error.strerror}); set HOTPASS_CACHE") from error
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _flush(folder: Path) -> None:
    """Write files through to the disk before the rename makes them visible, so that a power cut leaves no torn folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
