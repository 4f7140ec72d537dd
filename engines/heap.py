"""Memory that was freed, back to the system: an allocator keeps blocks of a few megabytes for later, and a child whose candidate is off
would look as if that had stayed."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """By glibc's malloc_trim; elsewhere nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
