"""Whether a process may still be forked for children that use CUDA. Imports nothing heavy: the zygote asks."""

from __future__ import annotations

import ctypes
import os
from typing import Any

LIBRARY = "libcuda.so.1"
_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED."""


def is_initialised(library: Any = None) -> bool:
    """Whether this process has initialised the driver, so that its forked children could not. Loads and initialises nothing.

    `library` stands in for libcuda in tests.
    """
    if library is None:
        try:
            library = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:  # nobody has loaded it
            return False
    return int(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _NOT_INITIALIZED
