"""The calls to the CUDA driver, against a library that notes them; and whether a process may be forked."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from engines.cuda import driver as module
from engines.cuda.driver import GRANULE_BYTES, CudaDriver, DriverError
from engines.cuda.forks import is_initialised


class Library:
    """libcuda as its documentation says, over addresses that are numbers. Arguments come as ctypes passes them on."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.opened: list[tuple[bytes, int]] = []
        self.fails: dict[str, int] = {}

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        address._obj.value = (1 << 40) + len(self.sizes)
        self.sizes[address._obj.value] = size.value
        return self.fails.get("alloc", 0)

    def cuMemFree_v2(self, address: Any) -> int:
        del self.sizes[address.value]
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        ctypes.memmove(ctypes.addressof(handle._obj), address.value.to_bytes(8, "little") + b"\0" * 55 + b"!", 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        self.opened.append((bytes(handle.words), flags.value))
        address._obj.value = int.from_bytes(bytes(handle.words)[:8], "little") + 5
        return self.fails.get("open", 0)

    def cuGetErrorName(self, code: Any, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_INVALID_CONTEXT"
        return 0


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def driver(library: Library) -> CudaDriver:
    return CudaDriver("cpu", library)


def test_an_allocation_is_whole_blocks_of_the_driver(driver: CudaDriver, library: Library) -> None:
    address = driver.allocate(GRANULE_BYTES + 1)
    assert library.sizes == {address: 2 * GRANULE_BYTES}
    driver.free(address)
    assert library.sizes == {}


def test_a_handle_goes_by_value_with_every_byte_and_comes_back_as_an_address(
    driver: CudaDriver, library: Library
) -> None:
    address = driver.allocate(100)
    handle = driver.export(address)
    assert len(handle) == 64
    assert handle[-1:] == b"!", "zeros in it end nothing"
    assert driver.open(handle) == address + 5
    assert library.opened == [(handle, 1)]


def test_what_the_driver_refuses_is_said_by_its_name(driver: CudaDriver, library: Library) -> None:
    library.fails["open"] = 201
    with pytest.raises(DriverError, match=r"cuIpcOpenMemHandle_v2: error 201 \(CUDA_ERROR_INVALID_CONTEXT\)"):
        driver.open(b"\0" * 64)
    with pytest.raises(DriverError, match="has 64 bytes, not 3"):
        driver.open(b"abc")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(DriverError, match="no CUDA context on cuda"):
        CudaDriver("cuda")


def test_memory_is_described_as_the_array_interface_asks() -> None:
    described = module._Foreign(1 << 41, 1000).__cuda_array_interface__
    assert described == {"shape": (1000,), "typestr": "|u1", "data": (1 << 41, False), "strides": None, "version": 3}


@pytest.mark.parametrize(("code", "initialised"), [(3, False), (0, True), (100, True)])
def test_a_process_that_initialised_the_driver_is_known(code: int, initialised: bool) -> None:
    class Loaded:
        def cuDeviceGetCount(self, count: Any) -> int:
            return code

    assert is_initialised(Loaded()) is initialised


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_process_without_the_driver_may_be_forked() -> None:
    assert not is_initialised()
