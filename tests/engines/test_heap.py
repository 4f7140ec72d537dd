"""What was freed is the system's again."""

from __future__ import annotations

import platform

import pytest
import torch

from engines.decoder.fingerprint import resident_bytes
from engines.heap import return_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator that keeps what was freed is glibc's")
def test_blocks_that_the_allocator_keeps_go_back() -> None:
    """Matrices of 2 MB, as packed weights are: after a few rounds glibc serves them from its heap, and keeps the heap."""
    return_freed_memory()
    before = resident_bytes()
    for _ in range(4):
        held = [torch.ones(1 << 19) for _ in range(64)]
        last = torch.ones(3000)  # above them in the heap, so that it cannot simply shrink
        del held
    kept = resident_bytes() - before
    return_freed_memory()
    assert resident_bytes() - before < 16 << 20, f"{kept >> 20} MiB were kept"
    assert last.numel() == 3000
