"""Engines as processes of their own: a runner's rows, turns and answer, or a tool's output, and why there is none.

runner ── TURN ──► the caller measures hotpass's part ── a line on stdin ──► runner goes on ── ROW … answer ──► Measured
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines.installs import ROOT, Absent
from benchmarks.baselines.sweep import ROW, TURN, Row

ENGINE_SECONDS = 1800
"""For one variant, at most: start, sweep, repeats."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One variant of an engine."""

    rows: list[Row]
    logits: np.ndarray | None = None
    """float32 [tokens, vocab], or log-probabilities [tokens - 1, vocab] of what follows all positions but the last."""
    logits_are: str = "logits"
    no_logits: str = ""
    """Why there are none."""
    cut: str = ""
    """Why not all of it was measured; empty when all was."""


def run_module(
    python: Path,
    module: str,
    orders: Mapping[str, Any],
    extra_path: Sequence[Path] = (),
    turn: Callable[[str], object] | None = None,
) -> Measured:
    """Run a runner in its environment and read its rows and its answer. One that ends early has the rows that it said, and why; one
    without any raises Absent."""
    with tempfile.TemporaryDirectory() as folder:
        logits = Path(folder, "logits.npy")
        request = Path(folder, "request.json")
        request.write_text(json.dumps({**orders, "logits": str(logits), "turns": turn is not None}))
        command = [str(python), "-m", f"benchmarks.baselines.{module}", str(request)]
        said, problem = converse(command, _environment(extra_path), turn or (lambda point: None))
        rows = [Row(**json.loads(line.removeprefix(ROW))) for line in said if line.startswith(ROW)]
        if problem:
            if not rows:
                raise Absent(problem)
            return Measured(rows=rows, no_logits=problem, cut=problem)
        found = np.load(logits) if logits.exists() else None
    return Measured(rows=rows, logits=found, **json.loads(said[-1]))


def converse(
    command: Sequence[str], environment: Mapping[str, str], turn: Callable[[str], object]
) -> tuple[list[str], str]:
    """What a process says on stdout, with a turn whenever it asks for one, and what went wrong (empty: nothing)."""
    said: list[str] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=ROOT
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(ENGINE_SECONDS, end)
        timer.start()
        try:
            for line in process.stdout:
                if not line.startswith(TURN):
                    said.append(line.strip())
                    continue
                turn(line.removeprefix(TURN).strip())
                process.stdin.write("\n")
                process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its exit code tells
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
        code = process.wait()
        errors.seek(0)
        if late.is_set():
            return said, f"did not end within {ENGINE_SECONDS} s"
        return said, _problem(command, code, errors.read()) if code or not said else ""


def run_tool(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENGINE_SECONDS, cwd=ROOT)
    except subprocess.TimeoutExpired:
        raise Absent(f"did not end within {ENGINE_SECONDS} s") from None
    if done.returncode or not done.stdout.strip():
        raise Absent(_problem(command, done.returncode, done.stderr))
    return done


def _problem(command: Sequence[str], code: int, said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()] or ["without a word"]
    errors = [line for line in lines if "Error" in line] or lines
    return f"{Path(command[0]).name} ended with {code}: {errors[-1].strip()[:300]}"


def _environment(extra_path: Sequence[Path]) -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT, *extra_path)))
    # Offline and without telemetry: nothing but the measured engine runs.
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
