"""What this machine does, measured: read bandwidth by working-set size, and FLOP rates of matrix products.

Runs as a process of its own (`python -m engines.probe_measure`), with the thread environment that engines have, and prints
one JSON object. What it does not do: tell what the machine is (`engines.probe`). Each figure is the best of several repeats
within about half a second, with the spread (best - worst) ÷ best beside it: other tenants only ever take bandwidth away.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Figures = dict[str, float | str | int]

SECONDS = 0.5
"""Aim for one figure."""
SOURCE = Path(__file__).with_name("probe_read.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=fast")
PASSES = 10_000_000
"""Of the multiply-add loop: some tens of milliseconds."""
MIB = 1 << 20

Read = Callable[[int, int, int], Sequence[float]]
"""(bytes, passes, repeats) → seconds of each repeat."""


def measure_cpu(threads: int, sizes: Sequence[int]) -> Figures:
    """`read_gb_per_s_at_<N>_mib` for each size in bytes, `read_spread` at the largest, `cpu_share`, `reader`, and the FLOP rates."""
    with tempfile.TemporaryDirectory(prefix="hotpass-probe-") as folder:
        library = native_library(Path(folder))
        read, reader = (native_reader(library, threads), "c++") if library else (torch_reader(threads), "torch.sum")
        own_rate = multiply_add_rate(library, threads) if library else 0.0
        figures: Figures = {"reader": reader, "threads": threads}
        cpu, wall = time.process_time(), time.perf_counter()
        for size in sizes:
            largest = size == max(sizes)
            best, spread = bandwidth(read, size, SECONDS if largest else SECONDS / 4)
            figures[f"read_gb_per_s_at_{size // MIB}_mib"] = round(best, 2)
            if largest:
                figures["read_spread"] = round(spread, 3)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        # Threads that read, or spin until the others are ready, take a whole core each, unless somebody else has it.
        figures["cpu_share"] = round(min(1.0, cpu / wall / threads), 3)
    return figures | faster(flop_rates("cpu", threads), own_rate)


def faster(rates: Figures, own_rate: float) -> Figures:
    """With the fp32 rate of multiply-adds in registers where a library's matrix product stays below it: a bound must hold for all."""
    by_library = float(rates["fp32_gflop_per_s"])
    if own_rate <= by_library:
        return rates
    return rates | {"fp32_gflop_per_s": round(own_rate, 1), "fp32_product_gflop_per_s": by_library}


def bandwidth(read: Read, size: int, seconds: float) -> tuple[float, float]:
    """Best GB/s over repeats of a working set, and their spread."""
    trial = min(read(size, max(1, 16 * MIB // size), 2))
    passes = max(1, round(max(1, 16 * MIB // size) * seconds / 5 / max(trial, 1e-6)))
    rates = [size * passes / 1e9 / elapsed for elapsed in read(size, passes, 5)]
    return max(rates), 1 - min(rates) / max(rates)


def native_library(folder: Path) -> ctypes.CDLL | None:
    """The C++ loops; None when there is no compiler that can build them."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    library = folder / "probe_read.so"
    for native in (("-march=native",), ("-mcpu=native",), ()):
        command = [compiler, *FLAGS, *native, str(SOURCE), "-o", str(library)]
        if subprocess.run(command, capture_output=True, timeout=120).returncode == 0:
            break
    else:
        return None
    return ctypes.CDLL(str(library))


def multiply_add_rate(library: ctypes.CDLL, threads: int) -> float:
    """GFLOP/s of fp32 multiply-adds in registers."""
    function = library.hotpass_multiply_add
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]
    return float(function(threads, PASSES, 5))


def native_reader(library: ctypes.CDLL, threads: int) -> Read:
    function = library.hotpass_read
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]

    def read(size: int, passes: int, repeats: int) -> Sequence[float]:
        seconds = (ctypes.c_double * repeats)()
        if not function(size, threads, passes, repeats, seconds):
            raise MemoryError(f"{size} bytes for the bandwidth probe")
        return list(seconds)

    return read


def torch_reader(threads: int) -> Read:
    """torch.sum over floats: reads everything once, but pays torch's dispatch on every pass, so small sets look slower."""
    import torch

    torch.set_num_threads(threads)

    def read(size: int, passes: int, repeats: int) -> Sequence[float]:
        data = torch.ones(size // 4)
        data.sum()
        return [_seconds(lambda: [data.sum() for _ in range(passes)]) for _ in range(repeats)]

    return read


def flop_rates(device: str, threads: int) -> Figures:
    """`fp32_gflop_per_s` and `bf16_gflop_per_s` of square matrix products, with spreads; fp32 is exact (no TF32)."""
    import torch

    if device == "cpu":
        torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    small, large = (256, 1024) if device == "cpu" else (1024, 8192)
    figures: Figures = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        trial = product(small, device, dtype)
        trial()
        # A CPU without units for a type multiplies it at a hundredth of its rate: seconds a product where others take milliseconds.
        n = small if device == "cpu" and _seconds(trial) * (large / small) ** 3 > SECONDS else large
        best, spread = _rate(product(n, device, dtype), 2.0 * n**3 / 1e9, device)
        figures[f"{name}_gflop_per_s"], figures[f"{name}_spread"] = round(best, 1), round(spread, 3)
    return figures


def product(n: int, device: str, dtype: Any) -> Callable[[], object]:
    """A product of two square matrices of normal values, of torch's `dtype`."""
    import torch

    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def measure_cuda() -> Figures:
    """`read_gb_per_s` of one GPU by torch.sum over 2 GiB, and its FLOP rates."""
    import torch

    data = torch.ones(1 << 29, device="cuda")
    best, spread = _rate(lambda: data.sum(), data.numel() * 4 / 1e9, "cuda")
    figures: Figures = {"reader": "torch.sum", "read_gb_per_s": round(best, 1), "read_spread": round(spread, 3)}
    return figures | flop_rates("cuda", 1)


def _rate(work: Callable[[], object], amount: float, device: str) -> tuple[float, float]:
    """Best amount per second of repeated work, and the spread of five repeats."""
    import torch

    def repeat(times: int) -> None:
        for _ in range(times):
            work()
        if device == "cuda":
            torch.cuda.synchronize()

    repeat(2)
    times = max(1, round(SECONDS / 5 / max(_seconds(lambda: repeat(1)), 1e-6)))
    rates = [amount * times / _seconds(lambda: repeat(times)) for _ in range(5)]
    return max(rates), 1 - min(rates) / max(rates)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="*", default=[], help="working sets in bytes")
    given = parser.parse_args()
    figures = measure_cpu(given.threads, given.sizes) if given.device == "cpu" else measure_cuda()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
