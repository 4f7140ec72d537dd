"""Code that torch.compile and Triton make of a candidate, made ahead of it by a process of its own and kept as files.

    candidate, shapes, weights ──key──► cache/compiled/<key>/{torchinductor,triton,…}, manifest.json
                                └─missing─► worker installs and warms up ──► its files, copied and hashed by this process

A candidate may write what it likes into its compilers' folders. So a folder belongs to one candidate (nothing in it is ever another's),
the worker cannot write anywhere else, the hashes are of copies that it cannot reach, `find` gives a folder out only while every hash
holds, and a child that gets it cannot write there. What is not here: using it (`engines.decoder.compile`). Not tried on a GPU.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from engines.build_compile_worker import Request
from engines.build_native import find_compiler
from engines.build_run import BuildLimits, Finished, build_failed, deadline_failed, run_limited
from engines.compile_cache import CACHE_VARIABLES, MANIFEST, ROOT_VARIABLE, room_of
from engines.heap import total_bytes
from engines.held_folder import HeldFolder
from engines.judge.install import PartFiles
from engines.prepare.cache import cache_root, machine_errors, make_once
from engines.program import KvPlan
from engines.threading_env import process_environment
from hotpass.canonical import bytes_hash, content_hash, to_plain
from hotpass.decode import DecodeError, from_plain
from hotpass.errors import MachineError
from hotpass.records.candidate import Candidate, PartSource
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import Failure, FailureKind
from hotpass.settings import DEFAULTS

COMPILED_VERSION = 1
"""Of what a worker does; a change compiles everything again."""
KEEP_BYTES = 4 << 30
"""Of compiled code on disk: folders used longest ago go first."""
CODE = "code"
"""Folder of a worker's compilers."""
LIBRARIES = ("torch", "transformers", "triton", "numpy")
"""Whose versions the code depends on."""
_NO_MEMORY = "allocate memory"
_UNBOUNDED = 1 << 46
"""Address space of a process that uses a GPU: its driver reserves more than there is memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileSetup:
    """What compiled code depends on beside its candidate: the engine that it is for, as far as its graphs can tell."""

    program: str
    """`package.module:Class` of the engine's program."""
    model: ModelRef
    plan: KvPlan
    """Rows and slots as the engine has them. Steps of a window are the engine's to find, and no graph depends on them."""
    device: str
    """`cpu` or `cuda`."""
    threads: int
    """Of the deployment as loaded."""
    search_path: tuple[str, ...] = ()
    """To import from, for a module's recipe."""


def needs_compiling(candidate: Candidate, device: str) -> bool:
    """Whether a compiler would run in the engine's child: the setting asks for one, or a part's text uses torch.compile or, on a GPU,
    Triton (which is interpreted elsewhere)."""
    if candidate.settings.get("compile_mode", DEFAULTS["compile_mode"]) != DEFAULTS["compile_mode"]:
        return True
    return any(_compiles(use.source, device) for use in candidate.parts)


def _compiles(source: PartSource, device: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(source.text())))
    except (SyntaxError, ValueError):
        return False  # it will be told when it is loaded
    names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    uses_triton = any(name.split(".")[0] == "triton" for name in imported)
    return "torch.compile" in names or (device == "cuda" and uses_triton)


def find(candidate: Candidate, setup: CompileSetup, cut: Sequence[int], *, cache_dir: Path | str | None) -> Path | None:
    """The folder of the candidate's compiled code, every file as it was hashed; None where none was made or one was altered."""
    folder = _folder(candidate, setup, cut, cache_dir)
    if not holds(folder):
        return None
    os.utime(folder)
    return folder


def compile_ahead(
    candidate: Candidate,
    setup: CompileSetup,
    cut: Sequence[int],
    parts: Sequence[PartFiles],
    *,
    cut_index: int,
    cache_dir: Path | str | None = None,
    deadline_seconds: float = 120.0,
) -> Path:
    """The same, made when there is none. `cut`: layers with one of each kind, the fewer the better; all depths share their code.

    `parts`: what was built for the candidate, whose derived weights of cut `cut_index` are those of `cut`. Raises CandidateFailed.
    """
    folder = _folder(candidate, setup, cut, cache_dir)
    request = Request(
        program=setup.program,
        candidate=candidate,
        model=setup.model,
        cut=tuple(cut),
        plan=setup.plan,
        device=setup.device,
        threads=setup.threads,
        native=tuple(dict(item.native) for item in parts),
        derived=tuple(
            {slot: str(path) for slot, path in item.derived[cut_index].items()} if item.derived else {}
            for item in parts
        ),
    )

    def make(made: Path) -> None:
        with HeldFolder(".compiling-", folder.parent) as work:
            _run_worker(request, setup, work, deadline_seconds)
            _take(work / CODE / candidate.id[:16], made)

    made = make_once(folder, ready=holds, make=make)
    with machine_errors(made):
        _trim(made.parent, spare=made)
    return made


def holds(folder: Path) -> bool:
    """Whether the folder has exactly the files of its manifest, each with the bytes that were hashed."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        found = _files(folder)
        return found.keys() == files.keys() and all(
            bytes_hash(path.read_bytes()) == files[name] for name, path in found.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _folder(candidate: Candidate, setup: CompileSetup, cut: Sequence[int], cache_dir: Path | str | None) -> Path:
    compiler = find_compiler()
    model = setup.model
    content = [
        COMPILED_VERSION,
        candidate.id,
        [model.weights_hash, model.config_hash, model.dtype, list(cut)],
        [setup.program, setup.device, setup.threads, to_plain(setup.plan)],
        [platform.python_version(), *(_version(name) for name in LIBRARIES)],
        [compiler.version, compiler.isa] if compiler else [],
    ]
    return cache_root(cache_dir) / "compiled" / content_hash(content)[:32]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _run_worker(request: Request, setup: CompileSetup, work: Path, deadline_seconds: float) -> None:
    """Have the compilers fill the folder. Raises CandidateFailed, or MachineError for a full disk."""
    (work / "request.json").write_text(json.dumps(to_plain(request)))
    environment = process_environment(setup.threads, setup.search_path) | {"TMPDIR": str(work), "HOME": str(work)}
    environment[ROOT_VARIABLE] = str(work / CODE)
    if setup.device == "cuda" and not environment.get("CUDA_VISIBLE_DEVICES", "0"):
        del environment["CUDA_VISIBLE_DEVICES"]  # an actor without a GPU of its own still compiles for the engine's
    done = run_limited(
        [sys.executable, "-m", "engines.build_compile_worker", str(work)],
        folder=work,
        environment=environment,
        deadline_seconds=deadline_seconds,
        limits=_limits(setup),
    )
    if done.timed_out:
        raise deadline_failed(f"compiling {request.candidate.label}", deadline_seconds)
    failure = _reported(work, request.candidate.label, done)
    if failure is not None:
        raise build_failed(failure.message, failure.detail, failure.kind)


def _reported(work: Path, label: str, done: Finished) -> Failure | None:
    """The failure that the worker told, or the one that its end amounts to; None when all went well."""
    if "No space left" in done.output:
        raise MachineError(
            f"no space left while writing to {work.parent}; free some, or set HOTPASS_CACHE to another disk"
        )
    if done.returncode:
        killed = done.returncode == -9 or _NO_MEMORY in done.output or "MemoryError" in done.output
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        kind = FailureKind.MEMORY if killed else FailureKind.BUILD
        return Failure(kind=kind, message=f"compiling {label} ended its process ({how})", detail=done.output)
    try:
        plain = json.loads((work / "reply.json").read_text())["failure"]
        return None if plain is None else from_plain(Failure, plain)
    except (OSError, ValueError, KeyError, TypeError, DecodeError):
        return Failure(kind=FailureKind.BUILD, message=f"compiling {label} left no report", detail=done.output)


def _take(code: Path, made: Path) -> None:
    """Copies of what the compilers left, out of reach of whatever still runs, and their hashes. Links are not followed or kept."""
    hashes: dict[str, str] = {}
    for room in map(room_of, CACHE_VARIABLES):
        for name, path in _files(code / room).items():
            target = made / room / name
            target.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes()
            target.write_bytes(content)
            target.chmod(0o444)
            hashes[f"{room}/{name}"] = bytes_hash(content)
    (made / MANIFEST).write_text(json.dumps({"files": hashes}, indent=0, sort_keys=True))


def _files(folder: Path) -> dict[str, Path]:
    """Relative path → plain file, but for the manifest and what only the compilers' run needed (locks, objects)."""
    return {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.name != MANIFEST and path.suffix not in (".lock", ".o")
    }


def _limits(setup: CompileSetup) -> BuildLimits:
    """Address space for the libraries, the mapped weights and copies of them."""
    values = setup.model.num_params * 4
    memory = min((24 << 30) + 8 * values, max(8 << 30, total_bytes()))
    return BuildLimits(memory_bytes=memory if setup.device == "cpu" else _UNBOUNDED, file_bytes=1 << 30)


def _trim(room: Path, spare: Path) -> None:
    """Remove folders used longest ago until the room holds no more than it may."""
    found = [(path.stat().st_mtime_ns, _size(path), path) for path in room.iterdir() if (path / MANIFEST).is_file()]
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= KEEP_BYTES:
            break
        if path != spare:
            shutil.rmtree(path, ignore_errors=True)
            total -= size


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
