"""A driver whose device memory is files: for tests of what is built on `engines.cuda.driver`, on machines without a GPU.

Several processes may use one folder. As on a GPU, whoever opens a handle may write, and nothing stops him.
"""

from __future__ import annotations

import itertools
import mmap
import os
from pathlib import Path

import torch

from engines.cuda.driver import HANDLE_BYTES, DriverError


class FileDriver:
    """Implements `engines.cuda.driver.Driver` over a folder. Addresses are numbers of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory: dict[int, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._serial = itertools.count(1)

    def allocate(self, num_bytes: int) -> int:
        address = next(self._serial)
        self._names[address] = f"{os.getpid()}-{address}"
        path = self._folder / self._names[address]
        path.write_bytes(b"\xa5" * num_bytes)  # as on a GPU, what was there before
        self._memory[address] = _mapped(path)
        return address

    def free(self, address: int) -> None:
        del self._memory[address]
        (self._folder / self._names.pop(address)).unlink()

    def export(self, address: int) -> bytes:
        return self._names[address].encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        path = self._folder / handle.rstrip(b"\0").decode()
        if not path.exists():
            raise DriverError("cuIpcOpenMemHandle_v2: error 201 (CUDA_ERROR_INVALID_CONTEXT)")
        address = next(self._serial)
        self._memory[address] = _mapped(path)
        return address

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        return self._memory[address][:num_bytes]

    def synchronize(self) -> None:
        """Writes to a file's mapping are there at once."""


def _mapped(path: Path) -> torch.Tensor:
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
