"""Sealed memory: read as it was written, written by nobody."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from engines.memory import (
    MemoryIndex,
    NotSealed,
    SealedMemory,
    SharedBuffer,
    TensorSpec,
    arrays,
    attach,
    check_sealed,
    layout,
    map_buffer,
    mapped_ranges,
    seal,
    sha256_of,
)


def tensors() -> dict[str, torch.Tensor]:
    tied = torch.arange(30, dtype=torch.float32).reshape(5, 6)
    return {
        "embedding": tied,
        "blocks": torch.arange(7, dtype=torch.uint8),
        "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "transposed": torch.arange(6, dtype=torch.int64).reshape(2, 3).T,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.25),
        "head": tied,
    }


def test_attached_tensors_equal_what_was_sealed() -> None:
    memory = seal(tensors(), "test")
    attached = attach(memory)
    memory.close()
    for name, tensor in tensors().items():
        assert attached[name].dtype is tensor.dtype
        assert torch.equal(attached[name], tensor), name


def test_tensors_lie_on_64_bytes_and_tied_ones_in_one_place() -> None:
    index = layout(tensors())
    place = {spec.name: spec.offset for spec in index.tensors}
    assert all(offset % 64 == 0 for offset in place.values())
    assert place["head"] == place["embedding"]
    assert len({place[name] for name in ("embedding", "blocks", "half", "transposed", "scalar")}) == 5
    attached = attach(seal(tensors(), "test"))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in attached.values() if tensor.numel())


def test_the_owner_cannot_write_grow_or_shrink() -> None:
    memory = seal(tensors(), "test")
    with pytest.raises(PermissionError):
        os.pwrite(memory.fd, b"x", 0)
    for size in (memory.index.num_bytes + 1, 1):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    memory.close()


def test_a_write_through_a_tensor_is_a_fault_of_the_writer() -> None:
    code = (
        "import torch\nfrom engines.memory import attach, seal\n"
        "attach(seal({'w': torch.ones(4)}, 'test'))['w'].add_(1)\nprint('written')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": os.getcwd()})
    assert done.returncode == -signal.SIGSEGV
    assert "written" not in done.stdout


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_WRITE, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL])
def test_memory_that_can_still_change_is_refused(seals: int) -> None:
    fd = os.memfd_create("half-sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 64)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    index = MemoryIndex(tensors=(), num_bytes=64)
    with pytest.raises(NotSealed, match="can still be changed"):
        check_sealed(fd, index)
    os.close(fd)


@pytest.mark.parametrize(
    ("offset", "shape"),
    [(64, (1 << 20,)), (-64, (1,)), (8, (1,)), (0, (-1,))],
    ids=["beyond", "before", "unaligned", "negative"],
)
def test_an_index_that_lies_is_refused(offset: int, shape: tuple[int, ...]) -> None:
    memory = seal({"w": torch.ones(32)}, "test")
    lie = MemoryIndex(
        tensors=(TensorSpec(name="w", dtype="float32", shape=shape, offset=offset),), num_bytes=memory.index.num_bytes
    )
    with pytest.raises(NotSealed, match="does not lie inside"):
        attach(SealedMemory(fd=memory.fd, index=lie))
    memory.close()


def test_a_descriptor_that_is_no_memory_is_refused() -> None:
    read, write = os.pipe()
    with pytest.raises(NotSealed, match="no memory file"):
        check_sealed(read, MemoryIndex(tensors=(), num_bytes=1))
    os.close(read)
    os.close(write)


def test_arrays_and_hash_see_the_same_bytes() -> None:
    memory = seal({"w": torch.arange(4, dtype=torch.float32)}, "test")
    again = seal({"w": torch.arange(4, dtype=torch.float32)}, "test")
    other = seal({"w": torch.arange(4, dtype=torch.float32) + 1}, "test")
    assert arrays(memory)["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    digests = [sha256_of(item.fd, item.index.num_bytes) for item in (memory, again, other)]
    assert digests[0] == digests[1] != digests[2]
    for item in (memory, again, other):
        item.close()


def test_a_buffer_is_poisoned_taken_and_of_fixed_size() -> None:
    buffer = SharedBuffer(6)
    child = map_buffer(buffer.fd)
    child.fill_(5.0)
    buffer.poison(4)
    child[:2] = torch.tensor([1.0, 2.0])
    taken = buffer.taken((2, 3))
    np.testing.assert_array_equal(taken, np.array([[1.0, 2.0, np.nan], [np.nan, 5.0, 5.0]], np.float32))
    child[0] = 9.0
    assert taken[0, 0] == 1.0
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 0)
    del child
    buffer.close()


def test_mappings_are_seen_from_outside() -> None:
    memory = seal({"w": torch.ones(2048)}, "test")
    assert mapped_ranges(os.getpid(), memory.inode) == ()
    attached = attach(memory)
    (found,) = mapped_ranges(os.getpid(), memory.inode)
    assert found.split()[1] == "r--s"
    del attached
    memory.close()
