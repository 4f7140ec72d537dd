"""Which GPUs this process may use, by NVML. Measures nothing, starts no CUDA context.

Not tried on a GPU: tested against a module that answers as NVML's documentation says.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotpass.errors import MachineError


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU."""

    index: int
    """NVML's, which follows the PCI bus."""
    uuid: str
    name: str
    """As `NVIDIA H200`."""
    memory_bytes: int
    sm_clock_max_mhz: int
    memory_clock_max_mhz: int
    power_limit_watts: int
    """The limit in force; 0 where the GPU does not tell."""
    driver: str


def gpus(nvml: Any = None, environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order; none without a driver. `nvml` stands in for pynvml in tests.

    Raises MachineError when there is a driver that does not answer, or a visible device that does not exist.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        found = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise MachineError(f"the GPU driver does not answer: {error}") from error
    finally:
        nvml.nvmlShutdown()
    return _visible(found, environ.get("CUDA_VISIBLE_DEVICES"))


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index=index,
        uuid=_string(nvml.nvmlDeviceGetUUID(handle)),
        name=_string(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        sm_clock_max_mhz=_optional(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_clock_max_mhz=_optional(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM),
        power_limit_watts=_optional(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle) // 1000,
        driver=_string(nvml.nvmlSystemGetDriverVersion()),
    )


def _optional(nvml: Any, ask: Any, *arguments: Any) -> int:
    """What NVML answers, 0 where this GPU does not support the question."""
    try:
        return int(ask(*arguments))
    except nvml.NVMLError_NotSupported:
        return 0


def _visible(found: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    if visible is None:
        return tuple(found)
    chosen: list[Gpu] = []
    for name in (item.strip() for item in visible.split(",")):
        if name in ("", "-1"):  # CUDA stops at the first entry that is no device
            break
        match = [gpu for gpu in found if name == str(gpu.index) or (not name.isdigit() and gpu.uuid.startswith(name))]
        if len(match) != 1:
            raise MachineError(f"CUDA_VISIBLE_DEVICES names {name!r}, which is not one of the {len(found)} GPUs here")
        chosen += match
    return tuple(chosen)


def _string(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
