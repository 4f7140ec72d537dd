"""Arm a: a cold vLLM for each candidate, as many starts as its interval takes, a process being the unit.

Two starts of the same program differ by more than two readings in one of them, so an interval over readings of one process would not
cover: candidate and as loaded each get starts until the interval of their difference is narrow, or their number is used up.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.experiments.candidates import Proposed
from benchmarks.experiments.deciding import Judged, Outcome, outcome_of_interval, unpaired_interval
from engines.program import CandidateFailed
from engines.vllm.environment import ROOT, find_python, vllm_environment
from engines.vllm.folder import model_folder
from engines.vllm_engine import VllmBuilder
from hotpass.canonical import to_plain
from hotpass.decode import json_safe
from hotpass.records.deployment import Deployment

START_SECONDS = 600


@dataclass(kw_only=True)
class ColdVllm:
    """The arm, with the starts of as loaded that its candidates are held against, until one of them is faster."""

    deployment: Deployment
    threads: int
    most_starts: int
    """Of a candidate, and of as loaded."""
    folder: Path
    on_start: Callable[[str, dict[str, float]], None]
    """Told of each start as it ends: who was in it, and its phases."""
    base: list[float] = field(default_factory=list)
    """Log step time of each start of the incumbent: as loaded, or the best so far."""
    base_seconds: float = 0.0
    """Spent on those: shared by all candidates of the arm."""
    starts: list[dict[str, float]] = field(default_factory=list)
    """Phases of every start."""
    groups: list[list[float]] = field(default_factory=list)
    """Log step times of the starts of each program."""

    def __post_init__(self) -> None:
        self.groups.append(self.base)
        self._python = find_python()
        self._model = model_folder(self.deployment.model, str(self.folder))
        self._builder = VllmBuilder(self.deployment.model, cache_dir=str(self.folder / "cache"), threads=self.threads)

    def decide(self, proposed: Proposed) -> Judged:
        start, base_before = time.perf_counter(), self.base_seconds
        values: list[float] = []
        self.groups.append(values)
        low = high = float("inf")
        try:
            files = self._builder.build(proposed.candidate, 120.0).parts
            orders = {
                "candidate": to_plain(proposed.candidate),
                "sources": [use.source.sha256 for use in proposed.candidate.parts],
                "native": [dict(item.native) for item in files],
                "derived": [{slot: str(path) for slot, path in item.derived[0].items()} for item in files],
            }
            outcome = Outcome.UNDECIDED
            while outcome is Outcome.UNDECIDED and len(values) < self.most_starts:
                values.append(self._start(proposed.name, orders))
                self._grow_base(len(values))
                low, high = unpaired_interval(self.base, values)
                outcome = outcome_of_interval(low, high)
        except CandidateFailed as error:
            return self._failed(proposed, start, Outcome.BUILD_FAILED, error.failure.message)
        except subprocess.CalledProcessError as error:
            return self._failed(proposed, start, Outcome.FAILED, str(error.stderr)[-200:])
        found = Judged(
            name=proposed.name,
            candidate_id=proposed.candidate.id,
            outcome=outcome,
            seconds=time.perf_counter() - start - (self.base_seconds - base_before),
            low=low,
            high=high,
            value=mean(self.base) - mean(values),
            rounds=len(values),
        )
        if found.is_faster:
            self.base = values
        return found

    def _grow_base(self, count: int) -> None:
        start = time.perf_counter()
        while len(self.base) < count:
            self.base.append(self._start("as loaded", {"candidate": None}))
        self.base_seconds += time.perf_counter() - start

    def _failed(self, proposed: Proposed, start: float, outcome: Outcome, reason: str) -> Judged:
        return Judged(
            name=proposed.name,
            candidate_id=proposed.candidate.id,
            outcome=outcome,
            seconds=time.perf_counter() - start,
            reason=reason,
        )

    def _start(self, name: str, orders: dict[str, Any]) -> float:
        """A process from its start to its end; its log step time."""
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
            model = self.deployment.model
            body = {**orders, "model": self._model, "dtype": model.dtype, "rows": self._rows(), "answer": str(answer)}
            body["max_model_len"] = min(1024, model.max_context)
            request.write_text(json.dumps(json_safe(body)))
            # One home for all starts: vLLM keeps there what it finds out about a model in a process of its own.
            environment = vllm_environment(self.threads, {}) | {"HOME": str(self.folder), "TMPDIR": folder}
            environment["PYTHONPATH"] = str(ROOT)
            command = [self._python, "-m", "benchmarks.experiments.run_cold_vllm", str(request)]
            subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=START_SECONDS
            )
            found: dict[str, float] = json.loads(answer.read_text())
        seconds = time.perf_counter() - start
        self.starts.append({**found, "seconds": seconds})
        self.on_start(name, self.starts[-1])
        return found["log_step"]

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "name": row.key,
                "phase": row.phase.value,
                "num_seqs": row.num_seqs,
                "query_tokens": row.query_tokens,
                "context": row.context_mean,
                "share": row.steps_share,
                "vocab": self.deployment.model.vocab_size,
            }
            for row in self.deployment.shapes.rows
        ]


def vllm_arm(arm: ColdVllm, proposals: Sequence[Proposed], report: Callable[[Judged], None]) -> list[Judged]:
    found = []
    for proposed in proposals:
        found.append(arm.decide(proposed))
        report(found[-1])
    return found
