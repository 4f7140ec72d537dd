"""Every part of the catalogue that runs on the device: logits against the float32 reference, time paired with the model as loaded.

Each part alone with its defaults, and again with CUDA graphs, in the decoder program of this process. Windows alternate ABBA; the
speedup is the median over blocks. It is no judge: no intervals, no stopping rule; its times say whether a part is worth a campaign.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.models import SHAPES, Loaded
from engines.program import CandidateFailed
from hotpass.parts import declaration
from hotpass.records.candidate import Candidate, Numerics, Value
from search.catalogue import load_catalogue

CLOCKS_AGREE = 0.1
"""Largest difference of events and the child's clock, as a share."""
ERROR_FACTOR = 2.0
"""A part of class tolerance may be off by this many times what the loaded model is off by: maxima over random logits are noisy."""
EXACT_SHARE = 1e-4
"""The same for a float32 model, as a share of the largest logit: it is off by nothing itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One candidate on one row."""

    candidate: str
    row: str
    ms: float | None
    """Of a step, median over windows, by the program's clock; None when it failed."""
    loaded_ms: float | None
    """Of as loaded, in the windows beside it."""
    speedup: float | None
    """Over the model as loaded: median of blocks."""
    spread: float | None
    """Half the range of the middle half of the blocks' log ratios; None with fewer than four."""
    error: float | None
    """Largest logit difference to the float32 reference."""
    loaded_error: float
    calls: int
    """Calls of the part in one step; 0 where the step is outside its domain."""
    clocks: float | None
    """Events over the clock, median; None on a CPU."""
    problem: str = ""
    """Why it failed or is wrong; empty when it is fine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """Windows of one candidate on one row."""

    logits: torch.Tensor
    seconds: Sequence[float]
    loaded_seconds: Sequence[float]
    log_ratios: Sequence[float]
    clocks: Sequence[float]
    calls: int


def check_parts(folder: Path, shape: str, dtype: str, device: str, steps: int, blocks: int) -> list[Result]:
    """As loaded first, then each candidate; each is printed as it comes."""
    return list(_Parts(Loaded(folder, SHAPES[shape], dtype, device, steps), blocks).results())


class _Parts:
    def __init__(self, loaded: Loaded, blocks: int) -> None:
        self.loaded, self.blocks = loaded, blocks
        self.rows = range(len(loaded.plan.rows))
        self._reference = [loaded.window("reference", row)[0] for row in self.rows]
        self._errors = [self._error(loaded.window("incumbent", row)[0], row) for row in self.rows]

    def results(self) -> Iterator[Result]:
        head = f"{'candidate':44} {'row':18} {'ms/step':>9} {'speedup':>8} {'error':>9} {'loaded':>9} {'clocks':>6}"
        print(head, file=sys.stderr)
        for candidate, kind in self._candidates():
            for row, ran in enumerate(self._ran(candidate)):
                result = self._result(candidate, kind, row, ran)
                cells = (_cell(result.ms, "9.3f"), _cell(result.speedup, "8.2f"), _cell(result.error, "9.2e"))
                tail = f"{result.loaded_error:9.2e} {_cell(result.clocks, '6.3f')} {result.problem}"
                print(f"{result.candidate:44} {result.row:18} {' '.join(cells)} {tail}", file=sys.stderr, flush=True)
                yield result

    def _candidates(self) -> Iterator[tuple[Candidate, Numerics]]:
        """As loaded and each part with its defaults, without and with CUDA graphs."""
        device = self.loaded.device
        graphs: list[Mapping[str, Value]] = [{}] if device == "cpu" else [{}, {"cuda_graphs": True}]
        for settings in graphs:
            yield Candidate(settings=settings), Numerics.TOLERANCE
        for source in load_catalogue(device):
            declared = declaration(source)
            if (
                declared.engine != "decoder"
                or declared.native
                or any(term.startswith("packed") for term in declared.requires)
            ):
                continue
            use = declared.bind(source)
            for settings in graphs:
                numerics = declared.numerics_of(use.params, self.loaded.model.dtype)
                yield Candidate(parts=(use,), settings=settings), numerics

    def _ran(self, candidate: Candidate) -> list[Ran | str]:
        """What each row gave, or why it gave nothing."""
        try:
            self.loaded.install(candidate)
            return [self._paired(row) for row in self.rows]
        except (CandidateFailed, RuntimeError) as failure:
            return [str(failure)[:160]] * len(self.rows)
        finally:
            self.loaded.program.uninstall("candidate")

    def _paired(self, row: int) -> Ran:
        """ABBA and BAAB in turn, after a window each that is not counted."""
        logits, _ = self.loaded.window("candidate", row)
        self.loaded.window("incumbent", row)
        seconds: dict[str, list[float]] = {"incumbent": [], "candidate": []}
        ratios, clocks, calls = [], [], 0
        for block in range(self.blocks):
            sums = dict.fromkeys(seconds, 0.0)
            for letter in ("ABBA", "BAAB")[block % 2]:
                side = "incumbent" if letter == "A" else "candidate"
                answer, reply = self.loaded.window(side, row)
                seconds[side].append(reply.seconds / reply.steps)
                sums[side] += reply.seconds
                if side == "candidate":
                    logits, calls = answer, sum(reply.activation.values()) // reply.steps
                    clocks.append(reply.device_seconds / reply.seconds)
            ratios.append(math.log(sums["incumbent"] / sums["candidate"]))
        return Ran(
            logits=logits, seconds=seconds["candidate"], loaded_seconds=seconds["incumbent"], log_ratios=ratios,
            clocks=clocks if self.loaded.device != "cpu" else (), calls=calls,
        )  # fmt: skip

    def _result(self, candidate: Candidate, kind: Numerics, row: int, ran: Ran | str) -> Result:
        key, loaded_error = self.loaded.plan.rows[row].key, self._errors[row]
        if isinstance(ran, str):
            # A part that reads lengths on the host refuses to be captured: an answer, not a fault.
            problem = "" if "cannot be captured" in ran else f"failed: {ran}"
            return Result(
                candidate=candidate.label, row=key, ms=None, loaded_ms=None, speedup=None, spread=None, error=None,
                loaded_error=loaded_error, calls=0, clocks=None, problem=problem,
            )  # fmt: skip
        error = self._error(ran.logits, row)
        limit = max(ERROR_FACTOR * loaded_error, EXACT_SHARE * float(self._reference[row].abs().max()))
        clocks = statistics.median(ran.clocks) if ran.clocks else None
        problem = ""
        if not (error <= limit or kind is Numerics.LOSSY):  # NaN is wrong too
            problem = f"wrong: error {error:.2e} above {limit:.2e}"
        elif clocks is not None and abs(clocks - 1) > CLOCKS_AGREE:
            problem = "clocks disagree"
        return Result(
            candidate=candidate.label, row=key, ms=1e3 * statistics.median(ran.seconds),
            loaded_ms=1e3 * statistics.median(ran.loaded_seconds), speedup=math.exp(statistics.median(ran.log_ratios)),
            spread=_spread(ran.log_ratios), error=error if math.isfinite(error) else None, loaded_error=loaded_error,
            calls=ran.calls, clocks=clocks, problem=problem,
        )  # fmt: skip

    def _error(self, logits: torch.Tensor, row: int) -> float:
        return float((logits - self._reference[row]).abs().max())


def _spread(log_ratios: Sequence[float]) -> float | None:
    if len(log_ratios) < 4:
        return None
    quarters = statistics.quantiles(log_ratios, n=4)
    return (quarters[2] - quarters[0]) / 2


def _cell(value: float | None, form: str) -> str:
    return format(value if value is not None else math.nan, form)
