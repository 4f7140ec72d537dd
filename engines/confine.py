"""Keeping a child's writes in its own folder, and the memory of the engine's other processes out of its reach (Landlock, Linux 5.13).

    child ── opens for reading ──► anything its user may
          ── writes, creates, removes ──► its folder, /dev, /proc/self; nothing else
          ── traces, reads memory, signals (Linux 6.12) ──► itself and what it starts; nothing else

The same user owns the judge's files and processes, so that file modes protect neither. Where the kernel does not know Landlock,
`confine` says so and the child runs without; the judge's outcome then rests on its clock and its own copy of the outputs.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls, of the same number on every architecture."""
_GET_ABI = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_WRITE_FILE, _REMOVE_DIR, _REMOVE_FILE = 1 << 1, 1 << 4, 1 << 5
_MAKE_ANY = sum(1 << bit for bit in range(6, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1

WRITABLE = ("/dev", "/proc/self")
"""Beside the child's folder: devices (a GPU's, /dev/null, shared memory), and the process's own entries."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def confine(folder: Path) -> str:
    """Confine the calling (single-threaded) process and all it will start. Returns "" or what could not be confined."""
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_ABI)
    if abi < 1:
        return f"Landlock not available ({os.strerror(ctypes.get_errno())})"
    writes = _writes(abi)
    rules = _Ruleset(fs=writes, scoped=_SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= 6 else 0)
    size = 24 if abi >= 6 else 8
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return f"no Landlock rules ({os.strerror(ctypes.get_errno())})"
    try:
        for path in (str(folder), *WRITABLE):
            _allow(libc, ruleset, path, writes)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(_RESTRICT_SELF, ruleset, 0):
            return f"Landlock not permitted ({os.strerror(ctypes.get_errno())})"
    finally:
        os.close(ruleset)
    return "" if abi >= 6 else "signals to other processes (Linux 6.12 confines them)"


def _writes(abi: int) -> int:
    """Every kind of change to files that this version of the interface can refuse."""
    writes = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_ANY
    return writes | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, writes: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _PathBeneath(allowed=writes, parent=parent)
        if libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0):
            raise OSError(ctypes.get_errno(), f"no Landlock rule for {path}")
    finally:
        os.close(parent)
