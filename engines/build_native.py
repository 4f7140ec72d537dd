"""C++ files of parts to shared libraries, kept by content: C++ text, macros it names, flags, compiler, instruction set.

    part's files ──► src/ ──compile──► object ──link──► <library>.so      cache/native/<key>/, made once, whole or not at all

The link command gets none of the part's flags: linked with -ffast-math, a library would switch the whole process to flushing
denormals to zero when it is loaded, the baseline included. What is not here: loading the libraries (an engine's child does).
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engines.build_run import BuildLimits, build_failed, deadline_failed, run_limited
from engines.prepare.cache import cache_root, make_once
from hotpass.canonical import bytes_hash, content_hash
from hotpass.parts import PartDeclaration
from hotpass.records.candidate import PartSource, Value

BUILD_VERSION = 1
"""Of the commands below; a change builds everything again."""

ALLOWED_FLAGS = (
    "-O2", "-fassociative-math", "-ffast-math", "-ffinite-math-only", "-ffp-contract=fast", "-ffp-contract=off",
    "-fno-exceptions", "-fno-math-errno", "-fno-rtti", "-fno-signed-zeros", "-fno-trapping-math",
    "-fno-tree-vectorize", "-fno-unroll-loops", "-freciprocal-math", "-funroll-loops", "-mprefer-vector-width=128",
    "-mprefer-vector-width=256", "-mprefer-vector-width=512", "-std=c++20",
)  # fmt: skip
"""What a part may add in `native_flags`: code generation only, nothing that names files or runs programs."""

_LIMITS = BuildLimits(memory_bytes=6 << 30, file_bytes=256 << 20)
_ENVIRONMENT = ("PATH", "LANG", "LD_LIBRARY_PATH", "CPATH", "LIBRARY_PATH")
_PROBE = '#include <omp.h>\nextern "C" int hp_probe() { int n = 0;\n#pragma omp parallel\n n = omp_get_num_threads(); return n; }\n'


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """A C++ compiler of this machine."""

    path: str
    version: str
    """First line of `--version`."""
    openmp: bool
    """Whether `-fopenmp` builds a library; without it pragmas are ignored and parts run on one thread."""
    isa: str
    """Hash of the processor's features, which `-march=native` compiles for."""

    @property
    def native_flag(self) -> str:
        return "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"


@functools.cache
def find_compiler() -> Compiler | None:
    """The compiler named by HOTPASS_CXX or CXX, else g++, else clang++; None when there is none that works."""
    names = [os.environ.get("HOTPASS_CXX", ""), os.environ.get("CXX", ""), "g++", "clang++"]
    for name in filter(None, names):
        path = shutil.which(name)
        if path is not None and (found := _tried(path)) is not None:
            return found
    return None


def _tried(path: str) -> Compiler | None:
    """The compiler at the path when it makes a shared library."""
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        for openmp in (True, False):
            source.write_text(_PROBE if openmp else 'extern "C" int hp_probe() { return 1; }\n')
            command = [
                path,
                "-shared",
                "-fPIC",
                *(["-fopenmp"] if openmp else []),
                "-o",
                f"{folder}/probe.so",
                str(source),
            ]
            try:
                done = subprocess.run(command, capture_output=True, check=False, timeout=60)
            except (OSError, subprocess.SubprocessError):
                return None
            if done.returncode == 0:
                return Compiler(path=path, version=version.splitlines()[0], openmp=openmp, isa=processor_features())
    return None


@functools.cache
def processor_features() -> str:
    """Hash of what this processor can do, as the kernel lists it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith(("flags", "Features")):
            return bytes_hash(" ".join(sorted(line.split(":", 1)[1].split())).encode())[:16]
    return platform.processor() or platform.machine()


def build_native(
    source: PartSource,
    declaration: PartDeclaration,
    params: Mapping[str, Value],
    *,
    cache_dir: Path | str | None = None,
    threads: int = 1,
    deadline_seconds: float = 120.0,
    compiler: Compiler | None = None,
) -> dict[str, Path]:
    """Library name → shared library, each compiled from its file with every bound parameter as `-DHP_<NAME>=<value>`.

    `threads`: compilations at once. Raises CandidateFailed (build; timeout at the deadline) with the tail of the compiler's output.
    """
    if not declaration.native:
        return {}
    compiler = compiler or find_compiler()
    if compiler is None:
        raise build_failed(
            f"part {source.name} has C++ files, and this machine has no C++ compiler; install g++ or clang++"
        )
    texts = [(path, text) for path, text in source.files if not path.endswith(".py")]
    flags = _flags(source.name, declaration, params, "".join(text for _, text in texts))
    libraries = sorted(declaration.native.items())
    key = content_hash([BUILD_VERSION, texts, libraries, flags, compiler.version, compiler.isa])
    target = cache_root(cache_dir) / "native" / key[:32]
    ends = time.monotonic() + deadline_seconds

    def ready(folder: Path) -> bool:
        return all((folder / f"{library}.so").is_file() for library in declaration.native)

    def make(folder: Path) -> None:
        _write_sources(source.name, texts, folder / "src")

        def compile_one(item: tuple[str, str]) -> None:
            _compile(
                source.name, *item, folder=folder, flags=flags, compiler=compiler, ends=ends, allowed=deadline_seconds
            )

        with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
            list(pool.map(compile_one, declaration.native.items()))

    folder = make_once(target, ready=ready, make=make)
    return {library: folder / f"{library}.so" for library in declaration.native}


def _compile(
    part: str,
    library: str,
    file: str,
    *,
    folder: Path,
    flags: Sequence[str],
    compiler: Compiler,
    ends: float,
    allowed: float,
) -> None:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"TMPDIR": str(folder)}
    parallel = ["-fopenmp"] if compiler.openmp else []
    made = f"{library}.o"
    steps = (
        [
            compiler.path,
            "-O3",
            compiler.native_flag,
            "-std=c++17",
            "-fPIC",
            *parallel,
            *flags,
            "-c",
            f"src/{file}",
            "-o",
            made,
        ],
        [compiler.path, "-shared", *parallel, "-Wl,-z,defs", made, "-o", f"{library}.so"],
    )
    for what, command in zip(("compiling", "linking"), steps, strict=True):
        done = run_limited(
            command, folder=folder, environment=environment, deadline_seconds=ends - time.monotonic(), limits=_LIMITS
        )
        if done.timed_out:
            raise deadline_failed(f"part {part}: {what} {file}", allowed)
        if done.returncode:
            raise build_failed(
                f"part {part}: {what} {file} fails: {_first_error(done.output, done.returncode)}", done.output
            )
    (folder / made).unlink()


def _first_error(output: str, returncode: int) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line or "undefined" in line]
    return (errors or lines or [f"exit {returncode} without a word"])[0]


def _write_sources(part: str, texts: Sequence[tuple[str, str]], folder: Path) -> None:
    for relative, text in texts:
        path = folder / relative
        if not path.resolve().is_relative_to(folder.resolve()):
            raise build_failed(f"part {part}: file {relative} lies outside of the part")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _flags(part: str, declaration: PartDeclaration, params: Mapping[str, Value], text: str) -> list[str]:
    """The part's own flags, and its parameters as macros: those that its C++ names, so that a parameter of the Python
    side alone builds nothing anew. Raises CandidateFailed for what is not allowed."""
    unknown = [flag for flag in declaration.native_flags if flag not in ALLOWED_FLAGS]
    if unknown:
        raise build_failed(f"part {part}: flag {unknown[0]} is not allowed; allowed: {' '.join(ALLOWED_FLAGS)}")
    for library, file in declaration.native.items():
        if not library.isidentifier():
            raise build_failed(f"part {part}: native library {library!r} is not a plain name")
        if not file.endswith(".cpp"):
            raise build_failed(f"part {part}: {file} is not C++; native files end in .cpp")
    named = {f"HP_{name.upper()}": _macro(part, name, value) for name, value in sorted(params.items())}
    pasted = "##" in text  # a name may be put together by the preprocessor
    macros = [f"-D{name}={value}" for name, value in named.items() if pasted or name in text]
    return [*declaration.native_flags, *macros]


def _macro(part: str, name: str, value: Value) -> str:
    """A parameter's value as C++ sees it: bool as 0 or 1, text as it is when it is one word."""
    if isinstance(value, bool):
        return str(int(value))
    if value is None:
        return "0"
    text = repr(value) if isinstance(value, float) else str(value)
    if isinstance(value, str) and not text.replace("-", "_").isidentifier():
        raise build_failed(
            f"part {part}: parameter {name}={value!r} cannot be a macro; use a word of letters, digits and _"
        )
    return text.replace("-", "_") if isinstance(value, str) else text
