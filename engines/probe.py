"""The machine as a `HardwareRef`: what it is, and how fast it reads and multiplies. And the floor that follows from that.

Facts come from `probe_host` and `probe_gpu`, figures from a measuring process (`probe_measure`) that has the thread environment
of engines. The identity of the hardware holds facts only; figures are in its details and vary from run to run.

Details on a CPU: `read_gb_per_s` (from memory), `cache_read_gb_per_s` (from the last-level cache), `effective_cache_bytes` (the
largest working set that still reads at cache speed: on a virtual machine, or beside busy neighbours, less than the kernel reports),
`read_gb_per_s_at_<N>_mib` (the curve behind these), `fp32_gflop_per_s`, `bf16_gflop_per_s`, spreads, `reader`, `threads`,
`cpu_share` (of its cores' time that the probe got while it read: below 1, others ran, and every figure is too low).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from engines.probe_gpu import Gpu, gpus
from engines.probe_host import Host, read_host
from engines.threading_env import process_environment
from hotpass.errors import InputError, MachineError
from hotpass.hardware.systems import SYSTEMS, match_gpu
from hotpass.records.deployment import HardwareRef

MIB = 1 << 20
MEASURE_TIMEOUT_SECONDS = 180
UNDISTURBED_CPU_SHARE = 0.9
"""A probe that got less of its cores measured its neighbours too."""
DEVICES = ("auto", "cpu", "cuda")


def probe_hardware(device: str = "auto", measure: bool = True) -> HardwareRef:
    """This machine. `auto` is `cuda` where a GPU and a torch built for it are here. `measure=False` leaves the figures out.

    About ten seconds with figures: run it while nothing else does. Raises InputError (unknown device) and MachineError.
    """
    if device not in DEVICES:
        raise InputError("device", device, "is not known", f"use one of {list(DEVICES)}")
    found = gpus() if device != "cpu" else ()
    if device == "auto":
        device = "cuda" if found and _torch_has_cuda() else "cpu"
    if device == "cpu":
        host = read_host()
        return cpu_ref(host, measured("cpu", host.cores, curve_sizes(host)) if measure else {})
    if not found:
        raise InputError("device", device, "is not on this machine", "use --device cpu, or install the GPU's driver")
    return gpu_ref(found, measured("cuda", 1, ()) if measure else {})


def cpu_ref(host: Host, figures: Mapping[str, Any]) -> HardwareRef:
    """Facts of a host and figures of `probe_measure` (none is fine) as one record."""
    details: dict[str, str | int | float] = {"core_cache_bytes": host.core_cache_bytes, "cpu_quota": host.cpu_quota}
    return HardwareRef(
        name=f"cpu:{host.model}",
        device="cpu",
        num_devices=host.cores,
        isa=host.isa,
        last_level_cache_bytes=host.last_level_cache_bytes,
        memory_bytes=host.memory_bytes,
        details=details | dict(figures) | (_read_summary(host, read_curve(figures)) if figures else {}),
    )


def gpu_ref(found: tuple[Gpu, ...], figures: Mapping[str, Any]) -> HardwareRef:
    """GPUs of one kind as one record; `memory_bytes` is of one of them. Raises MachineError for a mixture of kinds."""
    names = sorted({gpu.name for gpu in found})
    if len(names) > 1:
        raise MachineError(
            f"GPUs of {len(names)} kinds ({', '.join(names)}): choose one kind with CUDA_VISIBLE_DEVICES"
        )
    first = found[0]
    system = match_gpu(first.name, first.memory_bytes)
    published = SYSTEMS[system].figures() if system else {}
    return HardwareRef(
        name=system or first.name.lower().replace(" ", "-"),
        device="cuda",
        num_devices=len(found),
        isa=(),
        last_level_cache_bytes=int(published.get("last_level_cache_mb", 0) * 1_000_000),
        memory_bytes=first.memory_bytes,
        details={
            "gpu": first.name,
            "driver": first.driver,
            "sm_clock_max_mhz": first.sm_clock_max_mhz,
            "memory_clock_max_mhz": first.memory_clock_max_mhz,
            "power_limit_watts": min(gpu.power_limit_watts for gpu in found),
            **figures,
        },
    )


def curve_sizes(host: Host) -> tuple[int, ...]:
    """Working sets to read, bytes: powers of two from 1 MiB to at least three times the last-level cache, within memory."""
    most = min(max(1024 * MIB, 3 * host.last_level_cache_bytes), host.memory_bytes // 4)
    sizes = [MIB]
    while sizes[-1] < most and sizes[-1] * 2 <= host.memory_bytes // 4:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def measured(device: str, threads: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Figures of the measuring process. Raises MachineError when it fails."""
    command = [sys.executable, "-m", "engines.probe_measure", device, "--threads", str(threads)]
    command += ["--sizes", *map(str, sizes)] if sizes else []
    try:
        done = subprocess.run(
            command, env=process_environment(threads), capture_output=True, text=True, timeout=MEASURE_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise MachineError(f"the hardware probe did not finish within {MEASURE_TIMEOUT_SECONDS} s") from None
    if done.returncode != 0:
        raise MachineError(f"the hardware probe failed: {done.stderr.strip()[-500:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def read_curve(details: Mapping[str, Any]) -> dict[int, float]:
    """Working set in bytes → GB/s, ascending; empty when nothing was measured by size."""
    prefix, suffix = "read_gb_per_s_at_", "_mib"
    points = {
        int(key[len(prefix) : -len(suffix)]) * MIB: float(value)
        for key, value in details.items()
        if key.startswith(prefix) and key.endswith(suffix)
    }
    return dict(sorted(points.items()))


def physical_floor_ms(
    hardware: HardwareRef, *, weight_bytes: float, kv_bytes: float = 0.0, flops: float = 0.0, precision: str = "fp32"
) -> float | None:
    """The least time of a step, ms: what it must stream ÷ read bandwidth, or its FLOPs ÷ the FLOP rate, whichever is more.

    The bandwidth is that of the largest measured working set that is not larger than the stream, so a stream that fits a cache
    is held against the cache. `flops` (prefill) go at the rate of `precision`, `fp32` or `bf16`. None when a rate that is
    needed was not measured, or was measured while others ran (`cpu_share`): a floor that is too high is worse than none. Streams of weights that a step reads once and KV that it reads once; anything read again is extra.
    """
    if float(hardware.details.get("cpu_share", 1.0)) < UNDISTURBED_CPU_SHARE:
        return None
    stream = weight_bytes + kv_bytes
    curve = read_curve(hardware.details)
    fitting = [rate for size, rate in curve.items() if size <= stream]
    rate = fitting[-1] if fitting else max(curve.values(), default=0.0) or _figure(hardware, "read_gb_per_s")
    flop_rate = _figure(hardware, f"{precision}_gflop_per_s")
    if (stream and not rate) or (flops and not flop_rate):
        return None
    return max(stream / rate / 1e6 if stream else 0.0, flops / flop_rate / 1e6 if flops else 0.0)


def _read_summary(host: Host, curve: Mapping[int, float]) -> dict[str, int | float]:
    """Memory and cache bandwidth, and where one becomes the other."""
    sizes = list(curve)
    memory = curve[sizes[-1]]
    beyond_cores = 4 * host.core_cache_bytes * host.cores
    in_cache = [size for size in sizes if beyond_cores <= size <= host.last_level_cache_bytes // 2]
    if not in_cache:
        return {"read_gb_per_s": memory}
    cache = curve[in_cache[0]]
    fast = [size for size in sizes if curve[size] >= math.sqrt(cache * memory)]
    return {"read_gb_per_s": memory, "cache_read_gb_per_s": cache, "effective_cache_bytes": max(fast)}


def _figure(hardware: HardwareRef, name: str) -> float:
    return float(hardware.details.get(name, 0.0))


def _torch_has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None
