"""Tensors in sealed shared memory: written once by their owner, mapped read-only by everybody else.

    owner: tensors ──copy──► memfd ──seal (write, grow, shrink)──► fd ──SCM_RIGHTS──► attach: read-only views

A sealed memfd cannot be written by anyone, its owner included: files and private maps do not protect (the same user may chmod and
overwrite; a private map is silently writable). A write through an attached tensor is a segmentation fault of the writer.
Each tensor starts on a 64-byte boundary, since the last bits of fp32 sums change with alignment.

Also the buffers that a child writes its logits into: writable by both sides, of a size that neither can change.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

ALIGNMENT = 64
SEALED = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
FIXED_SIZE = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Where a tensor lies in a memory file; always contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file, a multiple of 64."""

    @property
    def num_bytes(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryIndex:
    """What a memory file holds. Two names may share one place (tied weights)."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int
    """Size of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedMemory:
    """A sealed memory file and its index. Whoever holds it closes `fd` once."""

    fd: int
    index: MemoryIndex

    def close(self) -> None:
        os.close(self.fd)

    @property
    def inode(self) -> int:
        """Names the file in /proc/<pid>/maps."""
        return os.fstat(self.fd).st_ino


class NotSealed(ValueError):
    """A file that was said to be sealed memory is not, or is not what its index says."""


def layout(tensors: Mapping[str, torch.Tensor]) -> MemoryIndex:
    """Places for the tensors, in their order; tensors that are the same view of the same memory get one place."""
    specs: list[TensorSpec] = []
    places: dict[tuple[object, ...], int] = {}
    end = 0
    for name, tensor in tensors.items():
        view = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        shared = places.get(view) if tensor.numel() else None
        offset = shared if shared is not None else -(-end // ALIGNMENT) * ALIGNMENT
        spec = TensorSpec(
            name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), offset=offset
        )
        if spec.dtype not in DTYPES:
            raise ValueError(f"{name}: {tensor.dtype} cannot be shared")
        places[view] = offset
        specs.append(spec)
        end = max(end, offset + spec.num_bytes)
    return MemoryIndex(tensors=tuple(specs), num_bytes=max(end, 1))


def seal(tensors: Mapping[str, torch.Tensor], label: str) -> SealedMemory:
    """Copy CPU tensors into a new memory file and seal it. `label` shows in /proc/<pid>/maps."""
    index = layout(tensors)
    fd = os.memfd_create(f"hotpass-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, index.num_bytes)
        written: set[int] = set()
        for spec in index.tensors:
            if spec.offset in written or spec.num_bytes == 0:
                continue
            written.add(spec.offset)
            _write_all(fd, _bytes_of(tensors[spec.name]), spec.offset)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALED)
    except BaseException:
        os.close(fd)
        raise
    return SealedMemory(fd=fd, index=index)


def check_sealed(fd: int, index: MemoryIndex) -> None:
    """Raises NotSealed unless the file is fully sealed and every tensor of the index lies inside it."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise NotSealed("the descriptor is no memory file") from None
    if seals & SEALED != SEALED:
        raise NotSealed("the memory file can still be changed")
    size = os.fstat(fd).st_size
    for spec in index.tensors:
        inside = spec.offset >= 0 and spec.offset % ALIGNMENT == 0 and spec.offset + spec.num_bytes <= size
        if spec.dtype not in DTYPES or any(length < 0 for length in spec.shape) or not inside:
            raise NotSealed(f"{spec.name} does not lie inside the memory file")


def attach(memory: SealedMemory) -> dict[str, torch.Tensor]:
    """Read-only views of every tensor; the mapping lives as long as any of them. Does not close `fd`. Raises NotSealed."""
    check_sealed(memory.fd, memory.index)
    base = _mapped_array(memory.fd, memory.index.num_bytes, mmap.PROT_READ)
    return {spec.name: _view(base, spec) for spec in memory.index.tensors}


def arrays(memory: SealedMemory) -> dict[str, np.ndarray]:
    """As `attach`, as numpy arrays (no bfloat16): for a judge that does no tensor operation."""
    check_sealed(memory.fd, memory.index)
    mapped = mmap.mmap(memory.fd, memory.index.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    return {
        spec.name: np.frombuffer(
            mapped, dtype=spec.dtype, count=spec.num_bytes // np.dtype(spec.dtype).itemsize, offset=spec.offset
        ).reshape(spec.shape)
        for spec in memory.index.tensors
    }


def sha256_of(fd: int, num_bytes: int) -> str:
    """Hash of a memory file, 64 hex digits."""
    digest = hashlib.sha256()
    with mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        for start in range(0, num_bytes, 1 << 24):
            digest.update(mapped[start : start + (1 << 24)])
    return digest.hexdigest()


class SharedBuffer:
    """float32 memory that a child writes and the judge reads. Its size is sealed: neither side can pull it from under the other."""

    def __init__(self, num_floats: int) -> None:
        self.num_floats = max(1, num_floats)
        self.fd = os.memfd_create("hotpass-out", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.num_floats * 4)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, FIXED_SIZE)
        self._map = mmap.mmap(self.fd, self.num_floats * 4)

    def poison(self, num_floats: int) -> None:
        """NaN over the first floats: what the child does not write stays visible as such."""
        np.frombuffer(self._map, np.float32, count=num_floats)[:] = np.nan

    def taken(self, shape: tuple[int, ...]) -> np.ndarray:
        """A copy of what was written, out of the child's reach."""
        count = int(np.prod(shape))
        return np.frombuffer(self._map, np.float32, count=count).reshape(shape).copy()

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


def map_buffer(fd: int) -> torch.Tensor:
    """In the child: the whole buffer as a writable flat float32 tensor. Does not close `fd`."""
    size = os.fstat(fd).st_size
    base = _mapped_array(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(base, dtype=torch.float32, count=size // 4)


def mapped_ranges(pid: int, inode: int) -> tuple[str, ...]:
    """Address ranges with their permissions at which a process maps a memory file, as /proc/<pid>/maps has them, sorted."""
    with open(f"/proc/{pid}/maps") as file:
        return tuple(sorted(_ranges_of(file, inode)))


def _ranges_of(lines: Iterator[str], inode: int) -> Iterator[str]:
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] == str(inode) and "memfd:hotpass" in fields[5]:
            yield f"{fields[0]} {fields[1]} {fields[2]}"


def _mapped_array(fd: int, num_bytes: int, protection: int) -> ctypes.Array[ctypes.c_uint8]:
    mapped = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, protection)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    # from_address, because torch takes only buffers that Python believes writable; the kernel knows better.
    array = (ctypes.c_uint8 * num_bytes).from_address(address)
    array._mapping = mapped  # type: ignore[attr-defined]  # torch keeps the array alive, the array keeps the mapping
    return array


def _view(base: ctypes.Array[ctypes.c_uint8], spec: TensorSpec) -> torch.Tensor:
    dtype = DTYPES[spec.dtype]
    if spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    count = spec.num_bytes // dtype.itemsize
    return torch.frombuffer(base, dtype=dtype, count=count, offset=spec.offset).view(spec.shape)


def tensor_over(memory: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor that a spec places in flat uint8 memory, on whatever device that is; nothing is copied."""
    dtype = DTYPES[spec.dtype]
    if spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype, device=memory.device)
    return memory[spec.offset : spec.offset + spec.num_bytes].view(dtype).view(spec.shape)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(fd, data[: 1 << 30], offset)
        data, offset = data[written:], offset + written


def file_of(data: bytes, label: str) -> int:
    """The descriptor of a new memory file that holds these bytes."""
    fd = os.memfd_create(f"hotpass-{label}", os.MFD_CLOEXEC)
    try:
        _write_all(fd, memoryview(data), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd
