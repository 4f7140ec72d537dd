"""Weights shared between processes: mapped without a copy, written to by the other process, found, written again; and memory levels.

    this process: Region ── handle ──► python -m benchmarks.gpu.mapper: map once, then look or write, an order a line

Over files in place of device memory the same checks run on a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from benchmarks.gpu.outcome import Check, Figures, Place, Skipped, Wrong, expect
from engines.cuda.checksum import checksum
from engines.cuda.conditions import GpuMonitor
from engines.cuda.driver import CudaDriver
from engines.cuda.level import allocated_bytes
from engines.cuda.region import Region, device_index
from engines.judge.clean import DEVICE_MARGIN_BYTES
from engines.judge.device import DRIVER_MARGIN_BYTES
from engines.memory import attach, seal
from hotpass.canonical import to_plain

ROOT = Path(__file__).resolve().parents[2]
MAPPER_SECONDS = 120.0
SHARED_MIB = 256
"""On a GPU; 1 on a CPU."""


def weights_by_ipc(place: Place) -> Figures:
    """Another process reads every byte of the weights at the place where this one put them, and its write is this one's."""
    with _region(place) as (region, _), _mapper(place, region) as order:
        start = time.perf_counter()
        told = order("look")
        a, b = (float(values.double().sum()) for values in _values(place))
        expect(told == {"a": a, "b": b, "tied": a}, f"the other process sees {told}")
        order("write one")
        expect(region.check().written == ("b",), "a write of the other process did not show: it has a copy")
        return {"other_process_s": time.perf_counter() - start, **region.weights.phases_ms}


def planted_writes(place: Place) -> Figures:
    """One bit, two values that changed places, changes that compensate each other, a tied weight: each named and undone."""
    with _region(place) as (region, truth), _mapper(place, region) as order:
        slowest = 0.0
        for action, names in (
            ("one bit", {"a", "tied"}),
            ("swap", {"b"}),
            ("compensate", {"b"}),
            ("both", {"a", "b", "tied"}),
        ):
            order(action)
            found = region.check()
            expect(set(found.written) == names, f"{action}: found {found.written}, not {sorted(names)}")
            expect(bool(torch.equal(region._memory.cpu(), truth)), f"{action}: not undone byte for byte")
            expect(region.check().written == (), f"{action}: found again although it was undone")
            slowest = max(slowest, found.reload_ms)
        start = time.perf_counter()
        region.check()
        seconds = time.perf_counter() - start
        return {
            "check_ms": seconds * 1e3,
            "check_gb_per_s": truth.numel() / seconds / 1e9,
            "slowest_reload_ms": slowest,
        }


def checksum_is_the_cpus(place: Place) -> Figures:
    """The same arithmetic here and there, for whole and for odd numbers of words, and the same twice."""
    data = torch.randint(0, 256, (8 * 3_000_001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    moved = data.to(place.device)
    for start in (0, 1 << 40):
        sums = {checksum(memory, 0x1234, start) for memory in (data, moved, moved)}
        expect(len(sums) == 1, f"{len(sums)} sums of the same bytes")
    return {"bytes": data.numel()}


def leaked_tensors(place: Place) -> Figures:
    """What a candidate keeps in torch's memory shows in the level; what it gave back does not."""
    place.needs_gpu("no device memory")
    device = torch.device(place.device)
    before = allocated_bytes(device)
    held = [torch.zeros(64 << 20, dtype=torch.uint8, device=device)]
    cycle: list[object] = [torch.zeros(64 << 20, dtype=torch.uint8, device=device)]
    cycle.append(cycle)
    other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(other):  # its workspace for products is its own
        torch.ones(256, 256, device=device) @ torch.ones(256, 256, device=device)
    del cycle
    grown = allocated_bytes(device) - before
    expect(grown > DEVICE_MARGIN_BYTES, "64 MiB that are kept do not show")
    held.clear()
    left = allocated_bytes(device) - before
    expect(left <= DEVICE_MARGIN_BYTES, f"{left >> 20} MiB show although all was given back")
    return {"kept_mib": grown >> 20, "left_mib": left >> 20}


def leak_past_torch(place: Place) -> Figures:
    """Memory from the driver itself shows in NVML's count of this process."""
    place.needs_gpu("no device memory")
    import os

    monitor, driver = GpuMonitor(), CudaDriver(place.device)
    before = monitor.process_bytes(os.getpid())
    if before is None:
        raise Skipped("NVML does not tell this process's memory (other process ids in a container, or MIG)")
    address = driver.allocate(2 * DRIVER_MARGIN_BYTES)
    now = monitor.process_bytes(os.getpid())
    driver.free(address)
    after = monitor.process_bytes(os.getpid())
    monitor.close()
    expect(
        now is not None and now - before > DRIVER_MARGIN_BYTES, f"{now} bytes after {before}: the leak does not show"
    )
    expect(after is not None and after - before <= DRIVER_MARGIN_BYTES, f"{after} bytes after {before}: it stays")
    return {"process_mib": before >> 20}


CHECKS: tuple[tuple[str, Check], ...] = (
    ("memory: weights by IPC", weights_by_ipc),
    ("memory: planted writes", planted_writes),
    ("memory: checksum", checksum_is_the_cpus),
    ("memory: leaked tensors", leaked_tensors),
    ("memory: leak past torch", leak_past_torch),
)


def _values(place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    count = (SHARED_MIB if place.on_gpu else 1) << 18
    random = torch.Generator().manual_seed(3)
    a = torch.randint(-99, 99, (count,), generator=random).float()
    return a, torch.randint(0, 99, (1001,), generator=random).half()


@contextmanager
def _region(place: Place) -> Iterator[tuple[Region, torch.Tensor]]:
    """The keeper's part, in this process, and a copy of every byte of it."""
    a, b = _values(place)
    sealed = seal({"a": a, "b": b, "tied": a}, "check")
    try:
        region = Region(attach(sealed), device_index(sealed.index, leave_out="packed:"), place.driver())
        try:
            yield region, region._memory.cpu().clone()
        finally:
            region.close()
    finally:
        sealed.close()


Order = Callable[[str], dict[str, float]]


@contextmanager
def _mapper(place: Place, region: Region) -> Iterator[Order]:
    """The other process; an order is answered with sums of the weights as it sees them before it carries it out."""
    birth = {"weights": to_plain(region.weights), "device": place.device, "folder": str(place.folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.mapper", json.dumps(birth)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def order(action: str) -> dict[str, float]:
        with suppress(BrokenPipeError):
            stdin.write(action + "\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            said = process.communicate()[1].strip().splitlines()
            raise Wrong(f"the other process: {said[-1] if said else 'ended'}")
        told: dict[str, float] = json.loads(line)
        return told

    watchdog = threading.Timer(MAPPER_SECONDS, process.kill)
    watchdog.start()
    try:
        yield order
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
