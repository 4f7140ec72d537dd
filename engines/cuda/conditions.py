"""What a GPU does while it is measured on, by NVML: clocks, temperature, power, why clocks are held down, memory of one process.

    between rounds: sample ──► slowed by heat or its supply? ──► the round is measured again, a few times at most
                           ──► Conditions ──► GpuConditions in the result

Asked by the judge, out of a candidate's reach, and never inside a window. Not tried on a GPU: tested against a stand-in that answers
as NVML's documentation says.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.probe_gpu import gpus
from hotpass.errors import MachineError
from hotpass.records.measurement import GpuConditions

REASONS = {
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}
"""Bits of NVML's clock event reasons (nvml.h, nvmlClocksEventReason…)."""

SLOWED = frozenset(
    ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake")
)
"""Under these a round says more about the machine than about the candidate. A power cap is none: it is how a busy GPU runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """One look at a GPU."""

    sm_clock_mhz: int
    memory_clock_mhz: int
    temperature_c: int
    power_watts: int
    """0 where the GPU does not tell."""
    reasons: tuple[str, ...]
    """Why clocks are below the highest; what NVML of another version calls something else is `reason 0x…`."""

    @property
    def slowed(self) -> tuple[str, ...]:
        return tuple(reason for reason in self.reasons if reason in SLOWED)


class GpuMonitor:
    """Looks at the first GPU that is visible. Close it."""

    def __init__(self, environ: Mapping[str, str] = os.environ, nvml: Any = None) -> None:
        """`nvml` stands in for pynvml in tests. Raises MachineError where there is no GPU to look at."""
        self._nvml = nvml if nvml is not None else _pynvml()
        found = gpus(self._nvml, environ)
        if not found:
            raise MachineError("NVML shows no GPU to this process")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(found[0].index)

    def sample(self) -> GpuState:
        """Raises MachineError when the GPU does not answer any more."""
        nvml, handle = self._nvml, self._handle
        try:
            return GpuState(
                sm_clock_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                memory_clock_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
                temperature_c=int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
                power_watts=self._or(0, nvml.nvmlDeviceGetPowerUsage) // 1000,
                reasons=reasons_of(self._or(0, self._ask_reasons)),
            )
        except nvml.NVMLError as error:
            raise MachineError(f"the GPU driver does not answer: {error}") from error

    def process_bytes(self, pid: int) -> int | None:
        """Device memory of a process as the driver counts it, whatever allocated it. None where it does not tell: in a container with
        other process ids, or under MIG."""
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        known = [item.usedGpuMemory for item in running if item.pid == pid and item.usedGpuMemory is not None]
        return int(known[0]) if known else None

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _ask_reasons(self, handle: Any) -> int:
        """By its newer name, or its older one."""
        ask = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        return int((ask or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))

    def _or(self, otherwise: int, ask: Callable[[Any], Any]) -> int:
        try:
            return int(ask(self._handle))
        except self._nvml.NVMLError_NotSupported:
            return otherwise


def _pynvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        raise MachineError("clocks cannot be looked at: nvidia-ml-py is not installed") from None


def reasons_of(bits: int) -> tuple[str, ...]:
    """Names of the bits that are set, the lowest first."""
    return tuple(REASONS.get(1 << bit, f"reason {1 << bit:#x}") for bit in range(bits.bit_length()) if bits >> bit & 1)


@dataclass(kw_only=True, slots=True)
class Conditions:
    """Samples of one measurement, and what they add up to."""

    sample: Callable[[], GpuState]
    states: list[GpuState] = field(default_factory=list)
    repeated: int = 0
    """Rounds that were measured again."""

    def note(self) -> GpuState:
        """Look now."""
        self.states.append(self.sample())
        return self.states[-1]

    def slowed(self) -> tuple[str, ...]:
        """Look now: what slows the GPU down so far that a round is to be measured again. Counts it as repeated."""
        reasons = self.note().slowed
        self.repeated += bool(reasons)
        return reasons

    def record(self) -> GpuConditions | None:
        """None where nobody looked."""
        states = self.states
        if not states:
            return None
        return GpuConditions(
            samples=len(states),
            sm_clock_mhz=(min(s.sm_clock_mhz for s in states), max(s.sm_clock_mhz for s in states)),
            memory_clock_mhz=(min(s.memory_clock_mhz for s in states), max(s.memory_clock_mhz for s in states)),
            temperature_max_c=max(s.temperature_c for s in states),
            power_max_watts=max(s.power_watts for s in states),
            limited_by=tuple(sorted({reason for s in states for reason in s.reasons if reason != "idle"})),
            rounds_repeated=self.repeated,
        )
