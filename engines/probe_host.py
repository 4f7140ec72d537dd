"""What this CPU is: cores that may be used, instruction sets, caches, memory. Reads /proc and /sys, measures nothing.

Every function takes the root of the file system, so that tests can lay one out. A fact that the kernel does not tell is 0 or empty.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

ISA = (
    "amx_bf16", "amx_int8", "amx_tile", "avx", "avx2", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512bw", "avx512f", "avx512vl",
    "avx_vnni", "f16c", "fma", "sse4_2",
    "asimd", "asimddp", "bf16", "i8mm", "sme", "sve", "sve2",
)  # fmt: skip
"""Flags of /proc/cpuinfo (x86, then Arm `Features`) that kernels ask about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine as seen by this process."""

    model: str
    """As `Intel(R) Xeon(R) Processor`."""
    cores: int
    """Physical cores that this process may run on, at most its CPU quota rounded down; at least 1."""
    cpu_quota: float
    """CPUs' worth of time that control groups allow; 0 without a limit."""
    isa: tuple[str, ...]
    core_cache_bytes: int
    """Level-2 cache of one core."""
    last_level_cache_bytes: int
    """The largest cache, as the kernel reports it; a virtual machine may have only a part of it to itself."""
    memory_bytes: int
    """Of the machine, or of the control group where that is less."""


def read_host(root: Path = ROOT, cpus: Collection[int] | None = None) -> Host:
    """`cpus`: logical CPUs that this process may run on, by default its affinity."""
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    quota = cpu_quota(root)
    cores = len({_core(root, cpu) for cpu in cpus})
    caches = dict(cache_sizes(root, min(cpus)))
    return Host(
        model=_cpuinfo(root, "model name") or platform.machine(),
        cores=max(1, min(cores, int(quota)) if quota else cores),
        cpu_quota=quota,
        isa=isa(root),
        core_cache_bytes=caches.get(2, 0),
        last_level_cache_bytes=caches[max(caches)] if caches else 0,
        memory_bytes=memory_bytes(root),
    )


def isa(root: Path = ROOT) -> tuple[str, ...]:
    """Features that kernels ask about, sorted."""
    flags = set((_cpuinfo(root, "flags") or _cpuinfo(root, "Features")).split())
    return tuple(sorted(flags & set(ISA)))


def cache_sizes(root: Path, cpu: int) -> Iterator[tuple[int, int]]:
    """(level, bytes) of the data and unified caches of a CPU."""
    for folder in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
        if _text(folder / "type") in ("Data", "Unified") and _text(folder / "level"):
            yield int(_text(folder / "level")), _bytes(_text(folder / "size"))


def cpu_quota(root: Path = ROOT) -> float:
    """CPUs' worth of time that the tightest of this process's control groups allows; 0 without a limit."""
    limits = []
    for folder in _groups(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=0.0)


def memory_bytes(root: Path = ROOT) -> int:
    """Memory of the machine, or the tightest limit of this process's control groups."""
    lines = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    machine = int(lines.get("MemTotal", "0 kB").split()[0]) * 1024
    limits = [
        _text(folder / name) for folder in _groups(root, "memory") for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group and those above it, for version 2 and for the controller's version 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / path.lstrip("/")
        yield group
        yield from (folder for folder in group.parents if folder == mount or mount in folder.parents)


def _core(root: Path, cpu: int) -> tuple[str, str]:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _text(topology / "physical_package_id"), _text(topology / "core_id") or f"cpu{cpu}"


def _cpuinfo(root: Path, key: str) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _bytes(text: str) -> int:
    """`2048K` → 2097152."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text and text[-1] in units else int(text or 0)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
