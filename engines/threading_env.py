"""Threads and environment of an engine's processes: set here, recorded with each measurement, and nowhere else.

Two traps, both measured: `OMP_PROC_BIND=true` put both threads of a child on one core, because a forked child inherits its zygote's
binding; and an idle process with `OMP_WAIT_POLICY=active` spins, and spoils its neighbour's windows. So binding is left out, waiting
is passive, and whatever the caller's environment says about either is dropped.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from hotpass.records.measurement import Environment

ALLOWED = (
    "PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "CC", "CXX",
    "TRITON_INTERPRET", "PYTHONNOUSERSITE",
)  # fmt: skip
"""What an engine's processes inherit from the caller; everything else (keys, tokens, proxies) stays out."""


def thread_environment(threads: int) -> dict[str, str]:
    """What the OpenMP and BLAS libraries of an engine's processes are told."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": "1",  # numpy only; its pool would start threads in the zygote
        "OMP_WAIT_POLICY": "passive",
        "OMP_DYNAMIC": "false",
        "MKL_DYNAMIC": "false",
        "KMP_BLOCKTIME": "0",
    }


def process_environment(threads: int, search_path: tuple[str, ...] = ()) -> dict[str, str]:
    """The whole environment of a keeper or a zygote. `search_path`: folders to import from, before this package's own root."""
    root = str(Path(__file__).resolve().parent.parent)
    given = {name: os.environ[name] for name in ALLOWED if name in os.environ}
    return {
        **given,
        **thread_environment(threads),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*search_path, root])),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compiler processes inside a child
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU initialises CUDA else, and a fork after it is useless
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator would start a thread in the zygote
        "ARROW_IO_THREADS": "1",
    }


def usable_cores() -> int:
    """Physical cores that this process may run on: at least one."""
    seen: set[tuple[str, str]] = set()
    for cpu in os.sched_getaffinity(0):
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            seen.add(((folder / "physical_package_id").read_text(), (folder / "core_id").read_text()))
        except OSError:
            seen.add(("", str(cpu)))
    return max(1, len(seen))


def environment_record(hardware_id: str, threads: int, compiler: str = "") -> Environment:
    """What must be equal for two measurements to be compared."""
    versions = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        **{name: _version(name) for name in ("torch", "transformers", "hotpass", "numpy")},
    }
    if compiler:
        versions["compiler"] = compiler
    return Environment(
        hardware_id=hardware_id,
        threads=threads,
        thread_env=thread_environment(threads),
        versions=versions,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "source"
