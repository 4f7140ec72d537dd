"""The level of a device's memory in this process: what is allocated once everything that can be given back has been.

Blocks that torch's allocator keeps for later, and the workspaces of its libraries, are given back first: they would look like what a
candidate has left. What was allocated past torch's allocator does not show here; the judge sees it by NVML (`engines.probe_gpu`).
"""

from __future__ import annotations

import gc

import torch


def settle(device: torch.device) -> None:
    """Give back what nothing uses. Does nothing on a CPU."""
    if device.type != "cuda":
        return
    gc.collect()  # a cycle may hold tensors, or a captured graph with its pool
    torch.cuda.synchronize(device)
    # Workspaces are per stream: a candidate's own stream leaves one behind.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> int:
    """Bytes in live tensors (and captured graphs) after settling; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    settle(device)
    return int(torch.cuda.memory_allocated(device))
