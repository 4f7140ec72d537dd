"""The texts of a campaign's parts, each once, by hash: what has to be durable before the log names a candidate.

    sources/<sha256>/part.py, …      written whole or not at all, verified by hash when read

A campaign composes thousands of candidates of a few dozen parts, so a trip to the disk for each part is few, and one for each
candidate would be most of what the driver does. What is not here: candidates (`cluster.store`).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath

from hotpass.errors import InputError, LedgerError
from hotpass.records.candidate import PartSource

FOLDER = "sources"


class SourceStore:
    """Of one campaign. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder) / FOLDER
        self._kept: set[str] = set()
        """Hashes known to be there, durable or waiting for it."""
        self._unsynced: list[Path] = []

    def keep(self, source: PartSource) -> None:
        """There when it returns, durable after `sync`. Raises InputError for a path that leads out, LedgerError."""
        sha = source.sha256
        if sha in self._kept:
            return
        target = self.folder / sha
        if self.find(source.name, sha) is None:
            try:
                _place(target, source)
            except OSError as error:
                raise LedgerError(f"part {source.name} cannot be written to {target}: {error.strerror}") from error
        # Also one that was there: whoever wrote it may have died before it was durable.
        self._unsynced.append(target)
        self._kept.add(sha)

    def sync(self) -> None:
        """Everything kept so far survives a loss of power. Raises LedgerError."""
        try:
            while self._unsynced:
                sync_folder(self._unsynced[-1])
                self._unsynced.pop()
        except OSError as error:
            raise LedgerError(f"sources cannot be made durable in {self.folder}: {error.strerror}") from error

    def find(self, name: str, sha256: str) -> PartSource | None:
        """The part under that name; None when its text is not there, or not whole."""
        folder = self.folder / sha256
        if not re.fullmatch(r"[0-9a-f]{64}", sha256) or not (folder / "part.py").is_file():
            return None
        try:
            files = [
                (path.relative_to(folder).as_posix(), path.read_bytes().decode())
                for path in folder.rglob("*")
                if path.is_file()
            ]
        except (OSError, UnicodeDecodeError):
            return None
        found = PartSource(name=name, files=tuple(files))
        return found if found.sha256 == sha256 else None


def _place(target: Path, source: PartSource) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for path, text in source.files:
            write_file(temporary / inside(source.name, path), text.encode())
        shutil.rmtree(target, ignore_errors=True)  # what is there is not whole
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def inside(part: str, path: str) -> str:
    """The path, if it stays inside of the folder that it is relative to. Raises InputError."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise InputError(f"part {part}: file", path, "leads out of its folder", "use a relative path without ..")
    return path


def write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def sync_folder(folder: Path) -> None:
    """Everything in it, and its name in its parents up to the campaign's folder. Raises OSError."""
    for path in (*folder.rglob("*"), folder, folder.parent, folder.parent.parent):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
