"""What was freed is the system's again."""

from __future__ import annotations

import platform

import pytest
import torch

from engines.decoder.fingerprint import resident_bytes
from engines.heap import return_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator that keeps what was freed is glibc's")
def test_blocks_that_the_allocator_keeps_go_back() -> None:
    """Matrices of some megabytes, as packed weights are: after a few rounds glibc serves them from its heap, and keeps the heap."""
    return_freed_memory()
    before = resident_bytes()
    stay: list[torch.Tensor] = []
    for _ in range(4):
        held = [torch.ones(rows * 576) for rows in (1536, 1536, 576, 192) * 20]
        stay = held[::8]  # among the others, to the last: whatever the heap was before, it cannot simply shrink
        del held
    kept = resident_bytes() - before - sum(tensor.nbytes for tensor in stay)
    return_freed_memory()
    left = resident_bytes() - before - sum(tensor.nbytes for tensor in stay)
    assert kept > 64 << 20, "without this the test shows nothing"
    assert left < kept / 4, f"{left >> 20} of {kept >> 20} MiB are still here"
