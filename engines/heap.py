"""Memory of the process and of the machine. What was freed goes back to the system: an allocator keeps blocks of a few megabytes for
later, and a child whose candidate is off would look as if that had stayed."""

from __future__ import annotations

import ctypes
import os


def return_freed_memory() -> None:
    """By glibc's malloc_trim; elsewhere nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def total_bytes() -> int:
    """Of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Of it, what can be had without swapping, by the kernel's own estimate; what is free where it makes none."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
