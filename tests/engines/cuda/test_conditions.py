"""What NVML says of a GPU while it is measured on, and what is made of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engines.cuda.conditions import Conditions, GpuMonitor, GpuState, reasons_of
from hotpass.errors import MachineError
from hotpass.records.measurement import GpuConditions


class NvmlError(Exception):
    pass


class NotSupported(NvmlError):
    pass


class Nvml:
    """NVML of two GPUs; the second can be looked at."""

    NVMLError, NVMLError_NotSupported = NvmlError, NotSupported
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self) -> None:
        self.open, self.bits, self.lost = 0, 0x4, False
        self.running: list[Any] = []

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=1 << 37)

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return 1980

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        if self.lost:
            raise NvmlError("GPU is lost")
        assert handle == 1
        return {1: 1755, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        raise NotSupported("Not Supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.bits

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        if self.lost:
            raise NvmlError("GPU is lost")
        return self.running


class NewerNvml(Nvml):
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return 0x1 | 0x40


VISIBLE = {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_look_at_the_visible_gpu() -> None:
    nvml = Nvml()
    monitor = GpuMonitor(VISIBLE, nvml)
    assert monitor.sample() == GpuState(
        sm_clock_mhz=1755, memory_clock_mhz=3201, temperature_c=61, power_watts=0, reasons=("software power cap",)
    )
    assert monitor.sample().slowed == ()
    monitor.close()
    assert nvml.open == 0


def test_the_newer_name_of_the_reasons_is_asked_first() -> None:
    state = GpuMonitor(VISIBLE, NewerNvml()).sample()
    assert state.reasons == ("idle", "hardware thermal slowdown")
    assert state.slowed == ("hardware thermal slowdown",)


def test_reasons_nobody_knows_keep_their_bit() -> None:
    assert reasons_of(0x8 | 0x1000) == ("hardware slowdown", "reason 0x1000")
    assert reasons_of(0) == ()


def test_memory_of_one_process() -> None:
    nvml = Nvml()
    nvml.running = [SimpleNamespace(pid=7, usedGpuMemory=1000), SimpleNamespace(pid=8, usedGpuMemory=None)]
    monitor = GpuMonitor(VISIBLE, nvml)
    assert [monitor.process_bytes(pid) for pid in (7, 8, 9)] == [1000, None, None]
    nvml.lost = True
    assert monitor.process_bytes(7) is None


def test_a_lost_gpu_is_the_machines_fault() -> None:
    nvml = Nvml()
    monitor = GpuMonitor(VISIBLE, nvml)
    nvml.lost = True
    with pytest.raises(MachineError, match="GPU is lost"):
        monitor.sample()


def test_no_gpu_is_the_machines_fault() -> None:
    with pytest.raises(MachineError, match="shows no GPU"):
        GpuMonitor({"CUDA_VISIBLE_DEVICES": ""}, Nvml())


def state(clock: int, *reasons: str) -> GpuState:
    return GpuState(
        sm_clock_mhz=clock, memory_clock_mhz=2, temperature_c=clock // 30, power_watts=clock // 3, reasons=reasons
    )


def test_samples_add_up() -> None:
    states = iter([state(1500, "idle"), state(1980, "software power cap"), state(900, "hardware slowdown", "idle")])
    conditions = Conditions(sample=lambda: next(states))
    assert conditions.record() is None
    assert [conditions.slowed() for _ in range(3)] == [(), (), ("hardware slowdown",)]
    assert conditions.record() == GpuConditions(
        samples=3,
        sm_clock_mhz=(900, 1980),
        memory_clock_mhz=(2, 2),
        temperature_max_c=66,
        power_max_watts=660,
        limited_by=("hardware slowdown", "software power cap"),
        rounds_repeated=1,
    )
