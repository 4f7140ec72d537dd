"""A keeper in this process whose device memory is files: for tests of what judge and children make of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engines import keeper as keeper_module
from engines.cuda.testing import FileDriver
from engines.keeper import serve
from engines.wire import channel_pair


class KeeperOnFiles:
    """Stands for `Launched`: the keeper's loop in a thread, over device memory that is files in `folder`."""

    folder: Path

    def __init__(self, module: str, environment: dict[str, str], *, limit: int) -> None:
        self.channel, theirs = channel_pair(parent_limit=limit, parent_accepts_fds=True, child_limit=1 << 28)
        self._thread = threading.Thread(target=serve, args=(theirs, lambda device: FileDriver(self.folder)))
        self._thread.start()
        self.pid = 0

    def alive(self) -> bool:
        return self._thread.is_alive()

    def last_words(self) -> str:
        return ""

    def close(self) -> None:
        self.channel.close()
        self._thread.join()


def keep_on_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on keepers are such ones."""
    monkeypatch.setattr(KeeperOnFiles, "folder", folder, raising=False)
    monkeypatch.setattr(keeper_module, "Launched", KeeperOnFiles)
