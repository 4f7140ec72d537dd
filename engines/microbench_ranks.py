"""Times sums over ranks of this machine for `hotpass microbench`: over gloo, between processes of one thread each.

    parent ──starts──► rank 0 … rank n-1 (a store in a file) ──all_reduce, in step──► rank 0 prints its medians

Not timed: exchanges of other kinds (the roofline of the same link stands in for them), NCCL, and links between machines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from engines.threading_env import process_environment
from hotpass.errors import MachineError

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
"""Bytes of a message."""
MOST_RANKS = 8
SLACK_SECONDS = 120.0
"""For starting the ranks."""


def rank_counts(places: int) -> tuple[int, ...]:
    """2, 4, 8, as far as there are cores."""
    return tuple(count for count in (2, 4, MOST_RANKS) if count <= places)


def reductions(ranks: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows of an all-reduce over so many ranks, one for each size: `batch` is the ranks, `n` the bytes. Raises MachineError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "engines.microbench_ranks", str(Path(folder) / "store"), "--ranks", str(ranks)]
        command += ["--seconds", str(seconds)]
        started = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], env=process_environment(1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            said = [one.communicate(timeout=seconds + SLACK_SECONDS) for one in started]
        except subprocess.TimeoutExpired:
            raise MachineError(f"{ranks} ranks did not finish summing") from None
        finally:
            for one in started:
                if one.poll() is None:
                    one.kill()
                    one.communicate()
    for one, (_, told) in zip(started, said, strict=True):
        if one.returncode != 0:
            raise MachineError(f"a rank of {ranks} failed: {told.strip()[-300:]}")
    for size, median in json.loads(said[0][0]).items():
        yield {"op": "allreduce", "dtype": "fp32", "batch": ranks, "n": int(size), "seconds": median}


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=1.0)
    given = parser.parse_args()
    distributed.init_process_group("gloo", init_method=f"file://{given.store}", rank=given.rank, world_size=given.ranks)
    found = {}
    for size in SIZES:
        found[size] = _median(torch.zeros(size // 4), given.seconds / len(SIZES))
    distributed.destroy_process_group()
    if given.rank == 0:
        print(json.dumps(found))


def _median(values: torch.Tensor, budget_seconds: float) -> float:
    """All ranks must run it equally often, so rank 0's first run says how often."""

    def run() -> float:
        start = time.perf_counter()
        distributed.all_reduce(values)
        return time.perf_counter() - start

    run()
    often = torch.tensor([max(3.0, min(200.0, 0.5 * budget_seconds / max(run(), 1e-6)))])
    distributed.broadcast(often, 0)
    runs = sorted(run() for _ in range(int(often.item())))
    return runs[len(runs) // 2]


if __name__ == "__main__":
    main()
