"""The few calls of the CUDA driver that an engine makes itself: device memory of its own, and handles by which others map it.

    keeper: allocate ──► address ──export──► 64 bytes ──socket──► child: open ──► address ──view──► uint8 tensor, nothing copied

The driver's own `cuMemAlloc`, and not torch's allocator: a block of that one cannot be exported where it uses expandable segments or
`cudaMallocAsync`, and torch's own sharing counts references in a file of shared memory, which a child that is killed never gives back.
What is allocated here belongs to nobody else's pool. Legacy handles work between processes of one PID namespace, as an engine's are.

Not tried on a GPU: written after the driver's documentation, and tested against a stand-in over files.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch

from engines.cuda.forks import LIBRARY

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
GRANULE_BYTES = 2 << 20
"""Allocations are multiples of it: a handle gives away a whole block of the driver, which smaller ones would share with others."""


class DriverError(RuntimeError):
    """A call of the driver failed, or there is no driver."""


class Driver(Protocol):
    """Device memory in addresses. `CudaDriver` on a GPU; tests have one over files."""

    def allocate(self, num_bytes: int) -> int: ...

    def free(self, address: int) -> None:
        """Only when nobody has the memory open any more: the driver leaves undefined what then happens."""
        ...

    def export(self, address: int) -> bytes:
        """A handle to an allocation, for other processes."""
        ...

    def open(self, handle: bytes) -> int:
        """The memory of another process's handle, mapped here for the life of this process."""
        ...

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """The memory as a flat uint8 tensor, writable; frees nothing when it goes."""
        ...

    def synchronize(self) -> None: ...


class CudaDriver:
    """One device's memory, in the context that torch uses on it. Makes that context: never before a fork."""

    def __init__(self, device: str, library: Any = None) -> None:
        """`library` stands in for libcuda in tests. Raises DriverError."""
        self._device = torch.device(device)
        try:
            torch.zeros(1, device=self._device)  # the primary context, current on this thread
            self._library = library if library is not None else ctypes.CDLL(LIBRARY)
        except (OSError, RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
            raise DriverError(f"no CUDA context on {device}: {str(error).splitlines()[0]}") from None

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(-(-max(1, num_bytes) // GRANULE_BYTES) * GRANULE_BYTES)
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.words)

    def open(self, handle: bytes) -> int:
        if len(handle) != HANDLE_BYTES:
            raise DriverError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_uint64()
        by_value = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_Foreign(address, num_bytes), device=self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            raise DriverError(f"{name}: error {code} ({self._error_name(code)})")

    def _error_name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        return (text.value or b"unknown").decode()


class _Handle(ctypes.Structure):
    """CUipcMemHandle: opaque, passed by value."""

    _fields_ = (("words", ctypes.c_ubyte * HANDLE_BYTES),)


class _Foreign:
    """Memory that torch did not allocate, by the protocol that it takes such memory through without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
