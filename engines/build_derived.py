"""Derived weights: what a part's `weights` makes of its slots' own weights, computed once, in a process of its own.

    (part, parameters, weights hash, slot[, cut]) ──key──► cache/derived/<key>.safetensors
                                                  └─missing─► worker process ──► files, renamed into place

A slot inside a layer depends on that layer alone, so every cut shares its file; slot `model` has one for each cut. The folder is
kept below a size: files used longest ago go first. What is not here: who maps the results (the keeper seals them).
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engines.build_run import BuildLimits, Finished, build_failed, deadline_failed, run_limited
from engines.build_worker import Job, Request
from engines.heap import total_bytes
from engines.held_folder import HeldFolder
from engines.prepare.cache import cache_root, machine_errors
from engines.threading_env import process_environment
from hotpass.canonical import content_hash, to_plain
from hotpass.decode import DecodeError, from_plain
from hotpass.errors import MachineError
from hotpass.records.candidate import PartSource, PartUse
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import Failure, FailureKind

DERIVED_VERSION = 1
KEEP_BYTES = 16 << 30
"""Of derived weights on disk; HOTPASS_DERIVED_BYTES sets another bound."""

_NO_MEMORY = "allocate memory"
"""In what torch's allocator says."""


def derives_weights(source: PartSource) -> bool:
    """Whether some class in a part's text has `weights`, read from the syntax tree."""
    return any(
        isinstance(item, ast.FunctionDef) and item.name == "weights"
        for node in ast.walk(ast.parse(source.text()))
        if isinstance(node, ast.ClassDef)
        for item in node.body
    )


def derive_weights(
    use: PartUse,
    model: ModelRef,
    jobs: Sequence[Job],
    *,
    cache_dir: Path | str | None = None,
    threads: int = 1,
    deadline_seconds: float = 120.0,
) -> dict[Job, Path]:
    """The derived weights of each job as a safetensors file. Raises CandidateFailed for what the part does wrong."""
    room = cache_root(cache_dir) / "derived"
    files = {job: room / f"{_key(use, model, job)}.safetensors" for job in jobs}
    with machine_errors(room / "x"), _one_maker(room, content_hash([use.source.sha256, use.params])):
        missing = tuple(job for job, path in files.items() if not path.is_file())
        if missing:
            request = Request(use=use, model=model, jobs=missing, threads=threads)
            with HeldFolder(".making-", room) as folder:
                _run_worker(request, folder, deadline_seconds)
                for index, job in enumerate(missing):
                    os.replace(folder / f"{index}.safetensors", files[job])
        for path in files.values():
            os.utime(path)
        _trim(room, spare=set(files.values()))
    return files


def _key(use: PartUse, model: ModelRef, job: Job) -> str:
    content = [DERIVED_VERSION, use.source.sha256, use.params, model.weights_hash, job.slot, job.layers]
    return content_hash(content)[:32]


def _run_worker(request: Request, folder: Path, deadline_seconds: float) -> None:
    """Have the files made in the folder. Raises CandidateFailed, or MachineError for a full disk."""
    (folder / "request.json").write_text(json.dumps(to_plain(request)))
    environment = process_environment(request.threads) | {"TMPDIR": str(folder), "HOME": str(folder)}
    done = run_limited(
        [sys.executable, "-m", "engines.build_worker", str(folder)],
        folder=folder,
        environment=environment,
        deadline_seconds=deadline_seconds,
        limits=_limits(request.model),
    )
    name = request.use.source.name
    if done.timed_out:
        raise deadline_failed(f"part {name}: weights()", deadline_seconds)
    failure = _reported(folder, name, done)
    if failure is not None:
        memory = _NO_MEMORY in failure.message + failure.detail
        raise build_failed(failure.message, failure.detail, FailureKind.MEMORY if memory else failure.kind)
    for index in range(len(request.jobs)):
        if not Path(folder, f"{index}.safetensors").is_file():
            raise build_failed(f"part {name}: weights() left a result out", done.output)


def _reported(folder: Path, name: str, done: Finished) -> Failure | None:
    """The failure that a worker told, or the one that its end amounts to; None when all went well."""
    if "No space left" in done.output or done.returncode == 28:
        raise MachineError(
            f"no space left while writing to {folder.parent}; free some, or set HOTPASS_CACHE to another disk"
        )
    if done.returncode:
        killed = done.returncode == -9 or "MemoryError" in done.output or _NO_MEMORY in done.output
        message = f"part {name}: weights() ended its process ({_ending(done.returncode)})"
        kind = FailureKind.MEMORY if killed else FailureKind.BUILD
        return Failure(kind=kind, message=message, detail=done.output)
    try:
        plain = json.loads((folder / "reply.json").read_text())["failure"]
        return None if plain is None else from_plain(Failure, plain)
    except (OSError, ValueError, KeyError, TypeError, DecodeError):
        return Failure(
            kind=FailureKind.BUILD, message=f"part {name}: weights() spoiled its own report", detail=done.output
        )


def _ending(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit {returncode}"


def _limits(model: ModelRef) -> BuildLimits:
    """Address space for the libraries, the mapped weights and copies of them; files for four float32 copies of the model."""
    values = model.num_params * 4
    memory = (24 << 30) + 8 * values
    return BuildLimits(memory_bytes=min(memory, max(8 << 30, total_bytes())), file_bytes=(1 << 28) + 4 * values)


@contextmanager
def _one_maker(room: Path, key: str) -> Iterator[None]:
    """One maker at a time for each part and parameters; the kernel ends a dead maker's turn."""
    room.mkdir(parents=True, exist_ok=True)
    with (room / f".{key[:16]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _trim(room: Path, spare: Iterable[Path]) -> None:
    """Remove files used longest ago until the room holds no more than it may; those just asked for stay."""
    bound = int(os.environ.get("HOTPASS_DERIVED_BYTES") or KEEP_BYTES)
    kept = set(spare)
    found = [(path.stat().st_mtime_ns, path.stat().st_size, path) for path in room.glob("*.safetensors")]
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= bound:
            break
        if path not in kept:
            path.unlink(missing_ok=True)
            total -= size
