"""The probe: facts from laid-out file systems and a hand-written NVML, figures from a short real measurement, floors by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines import probe, probe_measure
from engines.probe import cpu_ref, curve_sizes, gpu_ref, physical_floor_ms, probe_hardware, read_curve
from engines.probe_gpu import Gpu, gpus
from engines.probe_host import Host, cpu_quota, read_host
from engines.probe_measure import (
    bandwidth,
    faster,
    multiply_add_rate,
    native_library,
    native_reader,
    torch_reader,
)
from hotpass.errors import InputError, MachineError
from hotpass.records.deployment import HardwareRef

MIB = 1 << 20
GIB = 1 << 30


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def machine(root: Path, **more: str) -> Path:
    """Four logical CPUs on two cores, 64 MiB of level-3 cache, 8 GiB."""
    files = {
        "proc/cpuinfo": "processor : 0\nmodel name\t: Test CPU\nflags\t\t: fpu avx2 fma avx512f amx_tile",
        "proc/meminfo": "MemTotal:        8388608 kB\nMemFree: 1 kB",
        "proc/self/cgroup": "0::/user/job",
    }
    for cpu in range(4):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{topology}/physical_package_id"] = "0"
        files[f"{topology}/core_id"] = str(cpu // 2)
        for index, (level, kind, size) in enumerate(
            (("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "64M"))
        ):
            cache = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            files |= {f"{cache}/level": level, f"{cache}/type": kind, f"{cache}/size": size}
    return lay_out(root, files | more)


class TestHost:
    def test_facts(self, tmp_path: Path) -> None:
        assert read_host(machine(tmp_path), cpus=range(4)) == Host(
            model="Test CPU",
            cores=2,
            cpu_quota=0.0,
            isa=("amx_tile", "avx2", "avx512f", "fma"),
            core_cache_bytes=2 * MIB,
            last_level_cache_bytes=64 * MIB,
            memory_bytes=8 * GIB,
        )

    def test_affinity_counts_cores_not_threads(self, tmp_path: Path) -> None:
        assert read_host(machine(tmp_path), cpus=[0, 1]).cores == 1
        assert read_host(machine(tmp_path), cpus=[1, 2]).cores == 2

    def test_quota_of_the_tightest_group_limits_cores_and_memory(self, tmp_path: Path) -> None:
        groups = {
            "sys/fs/cgroup/user/job/cpu.max": "max 100000",
            "sys/fs/cgroup/user/cpu.max": "150000 100000",
            "sys/fs/cgroup/user/job/memory.max": str(2 * GIB),
        }
        host = read_host(machine(tmp_path, **groups), cpus=range(4))
        assert (host.cpu_quota, host.cores, host.memory_bytes) == (1.5, 1, 2 * GIB)

    def test_version_one_groups(self, tmp_path: Path) -> None:
        groups = {
            "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job\n0::/",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(GIB),
        }
        host = read_host(machine(tmp_path, **groups), cpus=range(4))
        assert (host.cpu_quota, host.cores, host.memory_bytes) == (3.0, 2, GIB)

    def test_no_limit_reads_as_zero(self, tmp_path: Path) -> None:
        assert cpu_quota(machine(tmp_path, **{"sys/fs/cgroup/user/job/cpu.max": "max 100000"})) == 0.0

    def test_an_arm_machine_without_caches_in_sysfs(self, tmp_path: Path) -> None:
        root = lay_out(tmp_path, {"proc/cpuinfo": "Features : fp asimd sve bf16", "proc/meminfo": "MemTotal: 1024 kB"})
        host = read_host(root, cpus=[0])
        assert host.isa == ("asimd", "bf16", "sve")
        assert (host.last_level_cache_bytes, host.cores, host.memory_bytes) == (0, 1, MIB)

    def test_this_machine(self) -> None:
        host = read_host()
        assert host.cores >= 1
        assert host.memory_bytes > 100 * MIB


class FakeNvmlError(Exception):
    pass


class FakeNotSupported(FakeNvmlError):
    pass


class FakeNvml:
    """Answers as NVML does, for GPUs given as (name, memory bytes)."""

    NVMLError = FakeNvmlError
    NVMLError_NotSupported = FakeNotSupported
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2

    def __init__(self, *found: tuple[str, int], driver: bool = True, power: bool = True) -> None:
        self.found, self.driver, self.power, self.open = found, driver, power, 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise FakeNvmlError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.found)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}abc"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.found[handle][0].encode()

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if self.found[handle][1] < 0:
            raise FakeNvmlError("GPU is lost")
        return SimpleNamespace(total=self.found[handle][1])

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        if not self.power:
            raise FakeNotSupported("Not Supported")
        return 700_000

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"


H200 = ("NVIDIA H200", 150_754_820_096)


class TestGpus:
    def test_facts(self) -> None:
        nvml = FakeNvml(H200)
        assert gpus(nvml, {}) == (
            Gpu(
                index=0,
                uuid="GPU-0abc",
                name="NVIDIA H200",
                memory_bytes=150_754_820_096,
                sm_clock_max_mhz=1980,
                memory_clock_max_mhz=3201,
                power_limit_watts=700,
                driver="580.65.06",
            ),
        )
        assert nvml.open == 0

    def test_no_driver_is_no_gpu(self) -> None:
        assert gpus(FakeNvml(H200, driver=False), {}) == ()

    def test_a_question_that_is_not_supported_is_zero(self) -> None:
        assert gpus(FakeNvml(H200, power=False), {})[0].power_limit_watts == 0

    def test_a_lost_gpu_is_the_machines_fault(self) -> None:
        nvml = FakeNvml(("NVIDIA H200", -1))
        with pytest.raises(MachineError, match="GPU is lost"):
            gpus(nvml, {})
        assert nvml.open == 0

    @pytest.mark.parametrize(
        ("visible", "expected"),
        [(None, [0, 1, 2]), ("2,0", [2, 0]), ("GPU-1", [1]), ("", []), ("-1", []), ("1,-1,2", [1])],
    )
    def test_visible_devices(self, visible: str | None, expected: list[int]) -> None:
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert [gpu.index for gpu in gpus(FakeNvml(H200, H200, H200), environ)] == expected

    def test_a_visible_device_that_is_not_there(self) -> None:
        with pytest.raises(MachineError, match="names '7', which is not one of the 1 GPUs"):
            gpus(FakeNvml(H200), {"CUDA_VISIBLE_DEVICES": "7"})

    def test_ref_takes_the_tables_name(self) -> None:
        ref = gpu_ref(gpus(FakeNvml(H200, H200), {}), {"read_gb_per_s": 4100.0})
        assert (ref.name, ref.device, ref.num_devices) == ("h200", "cuda", 2)
        assert ref.last_level_cache_bytes == 50_000_000
        assert ref.details["read_gb_per_s"] == 4100.0
        assert ref.details["driver"] == "580.65.06"

    def test_an_unlisted_gpu_keeps_its_own_name(self) -> None:
        ref = gpu_ref(gpus(FakeNvml(("NVIDIA GeForce RTX 4090", 24 * GIB)), {}), {})
        assert (ref.name, ref.last_level_cache_bytes) == ("nvidia-geforce-rtx-4090", 0)

    def test_a_mixture_is_refused(self) -> None:
        with pytest.raises(MachineError, match="2 kinds"):
            gpu_ref(gpus(FakeNvml(H200, ("NVIDIA L40S", 48 * GIB)), {}), {})


HOST = Host(
    model="Test CPU",
    cores=2,
    cpu_quota=0.0,
    isa=("avx2",),
    core_cache_bytes=2 * MIB,
    last_level_cache_bytes=300 * MIB,
    memory_bytes=24 * GIB,
)
CURVE = {1: 250.0, 4: 90.0, 16: 45.0, 64: 44.0, 128: 40.0, 256: 27.0, 1024: 26.0}
FIGURES = {f"read_gb_per_s_at_{size}_mib": rate for size, rate in CURVE.items()} | {
    "fp32_gflop_per_s": 250.0,
    "reader": "c++",
}


class TestRef:
    def test_memory_cache_and_where_the_cache_ends(self) -> None:
        details = cpu_ref(HOST, FIGURES).details
        assert details["read_gb_per_s"] == 26.0
        assert details["cache_read_gb_per_s"] == 45.0  # 16 MiB: beyond the level-2 caches of both cores
        assert details["effective_cache_bytes"] == 128 * MIB  # reported: 300 MiB
        assert read_curve(details) == {size * MIB: rate for size, rate in CURVE.items()}

    def test_identity_leaves_figures_out(self) -> None:
        assert cpu_ref(HOST, FIGURES).id == cpu_ref(HOST, {}).id
        assert cpu_ref(HOST, {}).id != cpu_ref(dataclasses.replace(HOST, cores=1), {}).id
        assert "read_gb_per_s" not in cpu_ref(HOST, {}).details

    def test_curve_reaches_beyond_the_cache_and_stays_within_memory(self) -> None:
        assert curve_sizes(HOST)[0] == MIB
        assert curve_sizes(HOST)[-1] >= 3 * HOST.last_level_cache_bytes
        assert curve_sizes(dataclasses.replace(HOST, memory_bytes=GIB))[-1] == 256 * MIB


class TestFloor:
    REF = cpu_ref(HOST, FIGURES)

    def floor(self, **given: Any) -> float | None:
        return physical_floor_ms(self.REF, **given)

    def test_a_stream_beyond_the_cache_goes_at_memory_speed(self) -> None:
        assert self.floor(weight_bytes=500e6, kv_bytes=40e6) == pytest.approx(540e6 / 27e9 * 1e3)
        assert self.floor(weight_bytes=2e9) == pytest.approx(2e9 / 26e9 * 1e3)

    def test_a_stream_within_the_cache_goes_at_cache_speed(self) -> None:
        assert self.floor(weight_bytes=80e6) == pytest.approx(80e6 / 44e9 * 1e3)

    def test_prefill_is_bound_by_flops(self) -> None:
        assert self.floor(weight_bytes=500e6, flops=138e9) == pytest.approx(138 / 250 * 1e3)

    def test_unknown_rates_give_no_floor(self) -> None:
        assert self.floor(weight_bytes=1e6, flops=1e9, precision="bf16") is None
        assert physical_floor_ms(cpu_ref(HOST, {}), weight_bytes=1e6) is None

    def test_a_disturbed_probe_gives_no_floor(self) -> None:
        def ref(share: float) -> HardwareRef:
            return cpu_ref(HOST, FIGURES | {"cpu_share": share})

        assert physical_floor_ms(ref(0.5), weight_bytes=80e6) is None
        assert physical_floor_ms(ref(0.99), weight_bytes=80e6) == self.floor(weight_bytes=80e6)

    def test_published_bandwidth_serves_where_none_was_measured(self) -> None:
        ref = dataclasses.replace(cpu_ref(HOST, {}), details={"read_gb_per_s": 3350.0})
        assert physical_floor_ms(ref, weight_bytes=3.35e9) == pytest.approx(1.0)


class TestMeasuring:
    def test_native_reader_reads_every_byte_that_it_times(self, tmp_path: Path) -> None:
        library = native_library(tmp_path)
        if library is None:
            pytest.skip("no C++ compiler")
        seconds = native_reader(library, threads=2)(8 * MIB, 4, 3)
        assert len(seconds) == 3
        assert all(second > 4 * 8 * MIB / 5e12 for second in seconds)  # faster than 5 TB/s would be no reading

    def test_multiply_adds_are_counted_and_not_optimised_away(self, tmp_path: Path) -> None:
        library = native_library(tmp_path)
        if library is None:
            pytest.skip("no C++ compiler")
        assert 0.5 < multiply_add_rate(library, 1) < 1000, "a core does a few hundred GFLOP/s at most"

    def test_the_fp32_rate_is_the_higher_of_product_and_multiply_adds(self) -> None:
        product = {"fp32_gflop_per_s": 140.0, "bf16_gflop_per_s": 1.0}
        assert faster(product, 120.0) == product
        assert faster(product, 180.04) == {
            "fp32_gflop_per_s": 180.0,
            "fp32_product_gflop_per_s": 140.0,
            "bf16_gflop_per_s": 1.0,
        }

    def test_no_compiler_is_no_native_reader(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert native_library(tmp_path) is None

    def test_torch_reader_gives_a_time_for_each_repeat(self) -> None:
        threads = torch.get_num_threads()
        try:
            assert len(torch_reader(1)(MIB, 2, 3)) == 3
        finally:
            torch.set_num_threads(threads)

    def test_bandwidth_is_the_best_repeat_and_tells_the_spread(self) -> None:
        def read(size: int, passes: int, repeats: int) -> list[float]:
            return [size * passes / 1e9 / rate for rate in (10.0, 8.0, 9.0, 10.0, 9.5)[:repeats]]

        best, spread = bandwidth(read, 64 * MIB, 0.1)
        assert best == pytest.approx(10.0)
        assert spread == pytest.approx(0.2)


def test_a_type_that_the_cpu_has_no_units_for_is_multiplied_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this clock a product of 256 takes a millisecond in fp32 and forty in bf16: one of 1,024 would take 2.6 seconds."""
    now, made = [0.0], []

    def product(n: int, device: str, dtype: Any) -> Callable[[], object]:
        made.append((n, dtype))
        step = (0.001 if dtype == torch.float32 else 0.04) * (n / 256) ** 3
        return lambda: now.__setitem__(0, now[0] + step)

    monkeypatch.setattr(probe_measure, "product", product)
    monkeypatch.setattr(probe_measure.time, "perf_counter", lambda: now[0])
    figures = probe_measure.flop_rates("cpu", torch.get_num_threads())
    assert made == [(256, torch.float32), (1024, torch.float32), (256, torch.bfloat16), (256, torch.bfloat16)]
    assert figures["fp32_gflop_per_s"] == pytest.approx(2 * 256**3 / 1e9 / 0.001, abs=0.1)
    assert figures["bf16_gflop_per_s"] == pytest.approx(2 * 256**3 / 1e9 / 0.04, abs=0.1)
    assert now[0] < 2.0


class TestProbeHardware:
    def test_without_figures(self) -> None:
        ref = probe_hardware("cpu", measure=False)
        assert isinstance(ref, HardwareRef)
        assert ref.name.startswith("cpu:")
        assert ref.id == probe_hardware("cpu", measure=False).id

    def test_unknown_and_absent_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InputError, match="device 'tpu' is not known"):
            probe_hardware("tpu")
        monkeypatch.setattr(probe, "gpus", lambda: ())
        with pytest.raises(InputError, match="device 'cuda' is not on this machine"):
            probe_hardware("cuda")

    def test_a_failing_measurement_is_the_machines_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe.sys, "executable", "/bin/false")
        with pytest.raises(MachineError, match="the hardware probe failed"):
            probe_hardware("cpu")

    @pytest.mark.slow
    def test_with_figures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "curve_sizes", lambda host: (MIB, 16 * MIB, 64 * MIB))
        details = probe_hardware("cpu").details
        assert details["threads"] == read_host().cores
        for name in ("read_gb_per_s", "fp32_gflop_per_s", "bf16_gflop_per_s"):
            assert float(details[name]) > 0
        assert 0 <= float(details["read_spread"]) <= 1
        assert 0 < float(details["cpu_share"]) <= 1
