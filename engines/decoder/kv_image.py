"""Contexts in the layout of a KV pool, in sealed memory: mapped over a pool, copy on write, they are what it holds.

    contexts of rows ──once──► memory file, sealed ──mmap over the pool's own addresses──► the pool as loaded

A pool is brought back by a mapping a tensor instead of a copy of all contexts: pages that a candidate wrote to were copies, and go;
those that nobody wrote are one for both sides. Where the mappings are as this image made them, by the kernel's account, only those
copies are given up, which the kernel's page map tells from the rest. Positions beyond the contexts are zero again. On a CPU; elsewhere
contexts are copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Mapping

import numpy as np
import torch

from engines.decoder.kv import KvPool
from engines.memory import SEALED

POPULATE_READ = 22
"""Of madvise (Linux 5.14): bring the pages in now, so that no window does."""
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def sealed_image(pool: KvPool, contexts: Mapping[int, torch.Tensor]) -> int:
    """Descriptor of a new image; the caller closes it. `contexts`: slot → KV [layers, 2, kv_heads, context, head_dim], rounded to the
    pool's dtype. `pool` is only looked at."""
    fd = os.memfd_create("hotpass-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes(pool))
        offset = 0
        for index, tensor in enumerate(pool.tensors()):
            layer, which = index % pool.num_layers, index // pool.num_layers
            _write(fd, tensor, offset, {slot: context[layer, which] for slot, context in contexts.items()})
            offset += _whole_pages(tensor)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALED)
    except BaseException:
        os.close(fd)
        raise
    return fd


def num_bytes(pool: KvPool) -> int:
    """Size of a pool's image."""
    return max(1, sum(map(_whole_pages, pool.tensors())))


class KvImage:
    """What pools of one geometry hold."""

    def __init__(self, fd: int, pool: KvPool, lengths: Mapping[int, int]) -> None:
        """Takes over `fd`, an image of that pool's geometry. `lengths`: slot → positions of its context. Raises ValueError."""
        if os.fstat(fd).st_size != num_bytes(pool):
            raise ValueError("an image of another pool")
        self._fd = fd
        self._inode = os.fstat(fd).st_ino
        self._covered: set[tuple[object, ...]] = set()
        """Memory of the pools that it lies over."""
        self._mapped: list[list[str]] = []
        """Where, as it was when it was put there."""
        self._geometry = pool.geometry
        self._lengths = {slot: length for slot, length in lengths.items() if length}

    def fits(self, pool: KvPool) -> bool:
        """Whether it can lie over the pool, whose tensors begin at pages."""
        aligned = all(tensor.data_ptr() % mmap.PAGESIZE == 0 for tensor in pool.tensors())
        return aligned and pool.geometry == self._geometry

    def cover(self, pool: KvPool) -> None:
        """The pool holds the contexts, and zeros elsewhere. Its addresses stay. Raises OSError."""
        if pool.memory() in self._covered and self._mapped == mappings(self._inode):
            with contextlib.suppress(PermissionError), open("/proc/self/pagemap", "rb", buffering=0) as page_map:
                for tensor in pool.tensors():
                    _give_up_copies(tensor, page_map.fileno())
                return
        self._map(pool)
        self._covered.add(pool.memory())
        self._mapped = mappings(self._inode)

    def _map(self, pool: KvPool) -> None:
        offset = 0
        for tensor in pool.tensors():
            size, access = _whole_pages(tensor), mmap.PROT_READ | mmap.PROT_WRITE
            at = _libc.mmap(tensor.data_ptr(), size, access, mmap.MAP_PRIVATE | _MAP_FIXED, self._fd, offset)
            if at == _FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            offset += size
            self._bring_in(tensor)

    def _bring_in(self, tensor: torch.Tensor) -> None:
        for slot, length in self._lengths.items():
            for head in tensor[slot]:
                start = head.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
                end = head.data_ptr() + length * head.stride(0) * head.itemsize
                if _libc.madvise(start, end - start, POPULATE_READ) and ctypes.get_errno() == errno.EINVAL:
                    return  # an older kernel: the passes that warm up bring them in


def mappings(inode: int) -> list[list[str]]:
    """Of a file in this process, as the kernel tells them: addresses, access, offset."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        found = [line.split(None, 5) for line in file if f" {inode} " in line]
    return [fields[:3] for fields in found if fields[4] == str(inode)]


def _give_up_copies(tensor: torch.Tensor, page_map: int) -> None:
    """Pages that were written since the tensor was covered: a next look at them sees the image again. Raises OSError."""
    size = _whole_pages(tensor)
    told = os.pread(page_map, size // mmap.PAGESIZE * 8, tensor.data_ptr() // mmap.PAGESIZE * 8)
    pages = np.frombuffer(told, np.uint64)
    own = ((pages >> np.uint64(62)) != 0) & ((pages >> np.uint64(61)) & np.uint64(1) == 0)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], own, [False])).astype(np.int8)))
    for first, end in edges.reshape(-1, 2).tolist():
        start = tensor.data_ptr() + first * mmap.PAGESIZE
        if _libc.madvise(start, (end - first) * mmap.PAGESIZE, _DONTNEED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_MAP_FIXED, _DONTNEED = 0x10, 4


def _write(fd: int, tensor: torch.Tensor, offset: int, contexts: Mapping[int, torch.Tensor]) -> None:
    """Through a mapping that is gone before the file is sealed."""
    with mmap.mmap(fd, _whole_pages(tensor), offset=offset) as mapped:
        view = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
        for slot, context in contexts.items():
            view[slot, :, : context.shape[1]].copy_(context)
        del view


def _whole_pages(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
