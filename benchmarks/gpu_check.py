"""Every part of the catalogue that runs on a GPU, checked and timed there, without Ray, without a hub: `python -m benchmarks.gpu_check`.

Makes random Llamas of published shapes, loads the decoder program in this process, installs each part alone (and again with CUDA
graphs), and compares logits with the float32 reference and times with the model as loaded. CUDA events and the wall clock must agree.
Prints a table, and one JSON line last; without a GPU the line says so and the exit is 0. Exit 1 when a part is wrong. It is no judge:
one process, no pairs, no intervals, so its times say whether a part is worth a campaign, and nothing more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engines.decoder.program import DecoderProgram
from engines.decoder.source import compile_part, derive
from engines.prepare import open_weights, prepare_model
from engines.prepare.tiny import make_tiny_model
from engines.program import Artefacts, CandidateFailed, KvPlan, WindowInputs
from hotpass.parts import declaration
from hotpass.records.candidate import Candidate, Numerics, Value
from hotpass.records.shapes import Phase, ShapeRow
from search.catalogue import load_catalogue

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 96, "heads": 6, "kv_heads": 2, "vocab": 256, "intermediate": 160},
    "135m": {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "vocab": 49152, "intermediate": 1536},
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "vocab": 128256, "intermediate": 8192},
}
"""`135m` as SmolLM2-135M, `1b` as Llama-3.2-1B, by their published configurations; `tiny` tries the script itself."""

Timed = tuple[torch.Tensor, float, float, int]
"""Logits of the last window, median ms of a step, event time over wall time, part calls a step."""

CLOCKS_AGREE = 0.1
"""Largest difference of events and wall clock, as a share."""
ERROR_FACTOR = 2.0
"""A part of class tolerance may be off by this many times what the loaded model is off by: maxima over random logits are noisy."""
EXACT_SHARE = 1e-4
"""The same for a float32 model, as a share of the largest logit: it is off by nothing itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One candidate on one row."""

    candidate: str
    row: str
    ms: float
    """Median over windows of the wall clock, of one step; NaN when it failed."""
    speedup: float
    """Over the model as loaded."""
    error: float
    """Largest logit difference to the float32 reference."""
    loaded_error: float
    calls: int
    """Calls of the part in one step; 0 where the step is outside its domain."""
    clocks: float
    """Event time over wall time; NaN on a CPU."""
    problem: str = ""
    """Why it failed or is wrong; empty when it is fine."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "1b"])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script, not the GPU parts"
    )
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing is checked", file=sys.stderr)
        print(json.dumps({"bench": "gpu_check", "gpu": None}))
        return 0
    gpu = torch.cuda.get_device_name() if chosen.device == "cuda" else "none (cpu)"
    shapes: dict[str, list[Result]] = {}
    for name in chosen.shapes:
        with tempfile.TemporaryDirectory() as folder:
            check = Check(Path(folder), SHAPES[name], chosen.dtype, chosen.device, chosen.steps, chosen.windows)
            shapes[name] = list(check.results())
    wrong = sum(bool(result.problem) for results in shapes.values() for result in results)
    line = {
        "bench": "gpu_check",
        "gpu": gpu,
        "torch": torch.__version__,
        "dtype": chosen.dtype,
        "provenance": "measured, one process, unpaired",
        "wrong": wrong,
        "results": {name: [_plain(result) for result in results] for name, results in shapes.items()},
    }
    print(json.dumps(line))
    return 1 if wrong else 0


class Check:
    """One model on one device."""

    def __init__(
        self, folder: Path, shape: Mapping[str, Any], dtype: str, device: str, steps: int, windows: int
    ) -> None:
        self.device, self.windows = device, windows
        prompt = min(512, 4 * steps)
        self.plan = KvPlan(
            rows=(_row(Phase.DECODE, 1, 1, 256), _row(Phase.DECODE, 8, 8, 256), _row(Phase.PREFILL, 1, prompt, 0)),
            steps_per_window=(steps, steps, 2),
            serving_slots=0,
            serving_context=0,
        )
        made = make_tiny_model(folder / "model", **shape, max_context=2048, dtype=dtype)
        self.model = prepare_model(str(made), cache_dir=folder / "cache")
        self.weights = open_weights(self.model)
        self.program = DecoderProgram()
        threads = torch.get_num_threads()
        self.program.load(self.model, self.weights, [tuple(range(shape["layers"]))], device, threads, self.plan)
        random = torch.Generator().manual_seed(1)
        self._tokens = [
            torch.randint(0, shape["vocab"], (steps, row.query_tokens), generator=random)
            for row, steps in zip(self.plan.rows, self.plan.steps_per_window, strict=True)
        ]
        self._contexts = [
            self.program.compute_contexts(
                0,
                row,
                [torch.randint(0, shape["vocab"], (n,), generator=random) for n in self.plan.row_contexts(row)],
            )
            for row in range(len(self.plan.rows))
        ]
        self._reference = [self._timed("reference", row, 1)[0] for row in range(len(self.plan.rows))]

    def results(self) -> Iterator[Result]:
        """As loaded first, then each candidate; each is printed as it comes."""
        print(f"{'candidate':44} {'row':18} {'ms/step':>9} {'speedup':>8} {'error':>9} {'loaded':>9} {'clocks':>6}")
        loaded = [self._timed("incumbent", row, self.windows) for row in range(len(self.plan.rows))]
        errors = [self._error(run[0], row) for row, run in enumerate(loaded)]
        for candidate, kind in self._candidates():
            for row, ran in enumerate(self._ran(candidate)):
                result = self._result(candidate, kind, row, ran, loaded[row][1], errors[row])
                print(
                    f"{result.candidate:44} {result.row:18} {result.ms:9.3f} {result.speedup:8.2f} {result.error:9.2e} "
                    f"{result.loaded_error:9.2e} {result.clocks:6.3f} {result.problem}",
                    flush=True,
                )
                yield result

    def _candidates(self) -> Iterator[tuple[Candidate, Numerics]]:
        """As loaded and each part with its defaults, without and with CUDA graphs."""
        graphs: list[Mapping[str, Value]] = [{}] if self.device == "cpu" else [{}, {"cuda_graphs": True}]
        for settings in graphs:
            yield Candidate(settings=settings), Numerics.TOLERANCE
        for source in load_catalogue(self.device):
            declared = declaration(source)
            if declared.native or any(term.startswith("packed") for term in declared.requires):
                continue
            use = declared.bind(source)
            for settings in graphs:
                yield Candidate(parts=(use,), settings=settings), declared.numerics_of(use.params, self.model.dtype)

    def _ran(self, candidate: Candidate) -> list[Timed | str]:
        """What each row gave, or why it gave nothing."""
        rows = range(len(self.plan.rows))
        try:
            self._install(candidate)
            return [self._timed("candidate", row, self.windows) for row in rows]
        except (CandidateFailed, RuntimeError) as failure:
            return [str(failure)[:160]] * len(rows)
        finally:
            self.program.uninstall("candidate")

    def _result(
        self, candidate: Candidate, kind: Numerics, row: int, ran: Timed | str, loaded_ms: float, loaded_error: float
    ) -> Result:
        key, nan = self.plan.rows[row].key, float("nan")
        if isinstance(ran, str):
            # A part that reads lengths on the host refuses to be captured: an answer, not a fault.
            problem = "" if "cannot be captured" in ran else f"failed: {ran}"
            return Result(
                candidate=candidate.label, row=key, ms=nan, speedup=nan, error=nan, loaded_error=loaded_error, calls=0,
                clocks=nan, problem=problem,
            )  # fmt: skip
        logits, ms, clocks, calls = ran
        error = self._error(logits, row)
        limit = max(ERROR_FACTOR * loaded_error, EXACT_SHARE * float(self._reference[row].abs().max()))
        problem = ""
        if not (error <= limit or kind is Numerics.LOSSY):  # NaN is wrong too
            problem = f"wrong: error {error:.2e} above {limit:.2e}"
        elif self.device == "cuda" and abs(clocks - 1) > CLOCKS_AGREE:
            problem = "clocks disagree"
        return Result(
            candidate=candidate.label, row=key, ms=ms, speedup=loaded_ms / ms, error=error, loaded_error=loaded_error,
            calls=calls, clocks=clocks, problem=problem,
        )  # fmt: skip

    def _install(self, candidate: Candidate) -> None:
        derived = []
        for use in candidate.parts:
            part = compile_part(use)
            slots = [slot.name for claim in part.declared.claims for slot in self.program.slots().matching(claim)]
            derived.append({slot: derive(part, self.weights.restricted(slot)) for slot in slots})
            part.forget()
        artefacts = Artefacts(native=({},) * len(derived), derived=tuple(derived))
        self.program.install("candidate", candidate, artefacts, 0)

    def _timed(self, side: str, row: int, windows: int) -> Timed:

        steps = self._tokens[row].shape[0]
        out = torch.empty(steps, self.plan.rows[row].num_seqs, self.model.vocab_size, device=self.device)
        wall, events, calls = [], [], 0
        for _ in range(windows + 1):  # the first is the warm-up
            self.program.load_contexts(side, 0, row, self._contexts[row])
            out.fill_(float("nan"))
            marks = _marks(self.device)
            start = time.perf_counter()
            reply = self.program.run_window(side, 0, row, WindowInputs(tokens=self._tokens[row], nonce="check"), out)
            events.append(marks() / steps)
            wall.append((time.perf_counter() - start) * 1e3 / steps)
            if reply.failure is not None:
                raise CandidateFailed(reply.failure)
            calls = sum(reply.activation.values()) // steps
        ms = statistics.median(wall[1:])
        return out.float().cpu(), ms, statistics.median(events[1:]) / ms, calls

    def _error(self, logits: torch.Tensor, row: int) -> float:
        return float((logits - self._reference[row]).abs().max())


def _marks(device: str) -> Any:
    """Starts a pair of CUDA events; the answer ends it and gives the ms between (NaN on a CPU)."""
    if device == "cpu":
        return lambda: float("nan")
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()

    def finish() -> float:
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))

    return finish


def _row(phase: Phase, num_seqs: int, query_tokens: int, context: int) -> ShapeRow:
    return ShapeRow(
        phase=phase, num_seqs=num_seqs, query_tokens=query_tokens, context_mean=context, context_max=context,
        steps_share=1 / 3, tokens_share=1 / 3,
    )  # fmt: skip


def _plain(result: Result) -> dict[str, object]:
    """For JSON: NaN is null there."""
    return {name: None if value != value else value for name, value in asdict(result).items()}


if __name__ == "__main__":
    sys.exit(main())
