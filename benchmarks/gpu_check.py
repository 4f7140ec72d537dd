"""Is everything that concerns a GPU right on this one? `python benchmarks/gpu_check.py`, without Ray, without a hub, without a model.

    memory   weights by IPC, planted writes, checksum, leaks          clocks   events and wall clock, L2 sweep, NVML
    graphs   replay, frozen facts, stale graph, moved address         parts    every part against its reference, paired speed
    engine   four processes, random weights of SmolLM2-135M's shape: sound candidates, and planted ones that must be found

Each check is told as it comes, on standard error, as passed, failed, or skipped with the reason; one JSON line last. Exit 1 when one
failed. Without a GPU the line says so and the exit is 0. `--device cpu` tries the script itself, with files for device memory. `--ray`
runs all of it inside one Ray actor that owns the GPU. Needs torch, triton, transformers, numpy, safetensors and pynvml, nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, in a checkout that nobody installed

import torch

from benchmarks.gpu import clocks, engine, graphs, memory
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.outcome import Outcome, Place, run_checks
from benchmarks.gpu.parts import Result, check_parts

CONCERNS = ("memory", "clocks", "graphs", "parts", "engine")


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing is checked", file=sys.stderr)
        print(json.dumps({"bench": "gpu_check", "gpu": None}))
        return 0
    line = _in_an_actor(arguments) if chosen.ray else check(chosen)
    print(json.dumps(line))
    return 1 if line["failed"] else 0


def check(chosen: argparse.Namespace) -> dict[str, object]:
    """Make the checks that were chosen; the line."""
    outcomes: list[Outcome] = []
    results: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        place = Place(device=chosen.device, folder=Path(folder))
        for name, room in (("memory", memory), ("clocks", clocks), ("graphs", graphs)):
            if name in chosen.only:
                outcomes += run_checks(room.CHECKS, place)
        if "parts" in chosen.only:
            for shape in chosen.shapes:
                for dtype in chosen.dtypes:
                    with tempfile.TemporaryDirectory(dir=folder) as room_of_one:
                        name = f"{shape} {dtype}"
                        results[name] = check_parts(
                            Path(room_of_one), shape, dtype, chosen.device, chosen.steps, chosen.blocks
                        )
                        outcomes.append(_of_parts(name, results[name]))
        if "engine" in chosen.only:
            outcomes += engine.check_engine(place)
    counts = {status: sum(item.status == status for item in outcomes) for status in ("passed", "failed", "skipped")}
    return {
        "bench": "gpu_check",
        "gpu": torch.cuda.get_device_name() if chosen.device == "cuda" else "none (cpu)",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "in_a_ray_actor": bool(chosen.ray),
        **counts,
        "checks": [asdict(item) for item in outcomes],
        "parts": {name: [asdict(result) for result in found] for name, found in results.items()},
        "provenance": "measured; parts paired in ABBA blocks of one process, without intervals",
    }


def _of_parts(name: str, results: Sequence[Result]) -> Outcome:
    """All parts of one model as one check."""
    wrong = [f"{result.candidate} on {result.row}: {result.problem}" for result in results if result.problem]
    status, reason = ("failed", "; ".join(wrong)[:1000]) if wrong else ("passed", "")
    return Outcome(name=f"parts: {name}", status=status, reason=reason, figures={"results": len(results)})


def _in_an_actor(arguments: Sequence[str] | None) -> dict[str, object]:
    """The same inside an actor to which Ray gives the GPU, as a campaign's engine is."""
    import ray

    given = list(sys.argv[1:] if arguments is None else arguments)
    root, num_gpus = str(Path(__file__).resolve().parents[1]), int(_parser().parse_args(given).device == "cuda")
    ray.init(include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": root}})
    try:
        if ray.cluster_resources().get("GPU", 0) < num_gpus:  # an actor that asks for more would wait for ever
            raise SystemExit(
                "Ray sees no GPU on this machine, although torch does: is CUDA_VISIBLE_DEVICES set for it?"
            )
        actor = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=0)(_Owner).remote()
        line: dict[str, object] = ray.get(actor.check.remote(given))
        return line
    finally:
        ray.shutdown()


class _Owner:
    """The actor. Its children see the GPU that Ray gave it, by CUDA_VISIBLE_DEVICES."""

    def check(self, arguments: list[str]) -> dict[str, object]:
        return check(_parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=CONCERNS, default=CONCERNS, help="what to check; all by default")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "1b"], help="models for the parts")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script, not a GPU")
    parser.add_argument("--blocks", type=int, default=6, help="ABBA blocks of a part on a row")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a window")
    parser.add_argument("--ray", action="store_true", help="inside one Ray actor that owns the GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
