"""Arms b and c: the decoder engine, cold for each candidate or kept up, by the same builder, judge and early stopping.

c: load once ──► build, measure, judge, promote ──► next candidate        b: the same, in a process that is new for each
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from actors.spec import EngineSpec, make_builder, make_engine
from benchmarks.experiments.candidates import Proposed
from benchmarks.experiments.deciding import (
    STOPPING,
    Judged,
    Outcome,
    interval_of,
    outcome_of,
    rounds_needed,
)
from engines.decoder_engine import DecoderEngine
from engines.program import CandidateFailed
from hotpass.decode import from_plain, json_safe
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Assignment, Attempt, MeasureResult, Pairing, Purpose, Stopping, Tier
from verification.numerics import Band, calibrate, loaded_checks
from verification.policy import Policy
from verification.verdict import judge

POLICY = Policy(numerics=Numerics.LOSSY)
DEADLINE_SECONDS = 120.0
PROMOTIONS = 2
"""Measurements after the first, at most, of a winner whose interval is still wide."""

Report = Callable[[Judged], None]


class Session:
    """A loaded engine with its builder and band."""

    def __init__(
        self, deployment: Deployment, cache_dir: str, stopping: Stopping = STOPPING, kind: str = "decoder"
    ) -> None:
        """`kind`: of the engine, `decoder` or `vllm`."""
        self.deployment, self.stopping = deployment, stopping
        self._built: set[str] = set()
        spec = EngineSpec(kind=kind, name="experiments", cache_dir=cache_dir)
        self.builder = make_builder(spec, deployment)
        engine = make_engine(spec, deployment)
        assert isinstance(engine, DecoderEngine)
        self.engine = engine
        start = time.perf_counter()
        self.engine.load(deployment, Tier.FAST)
        self.load_seconds = time.perf_counter() - start
        self.band = self._band()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def decide(self, proposed: Proposed) -> Judged:
        """Build, measure, judge; promoted while a winner's interval is wider than the bound."""
        start = time.perf_counter()
        candidate = proposed.candidate
        try:
            self._build_incumbent(proposed.against)
            built = self.builder.build(candidate, DEADLINE_SECONDS)
        except CandidateFailed as error:
            return Judged(
                name=proposed.name,
                candidate_id=candidate.id,
                outcome=Outcome.BUILD_FAILED,
                seconds=time.perf_counter() - start,
                build_seconds=time.perf_counter() - start,
                reason=error.failure.message[:200],
            )
        build_seconds = built.native_seconds + built.derive_seconds
        stopping = self.stopping
        attempt, result = self._measured(proposed, stopping)
        for number in range(PROMOTIONS):
            if outcome_of(attempt) is not Outcome.UNDECIDED:
                break
            low, _, high = interval_of(attempt)
            rounds = rounds_needed(low, high, attempt.rounds, stopping.alpha)
            if rounds is None:
                break
            stopping = replace(self.stopping, min_rounds=rounds, max_rounds=2 * rounds)
            attempt, result = self._measured(proposed, stopping, Purpose.REMEASURE, number + 1)
        return judged(proposed, attempt, result, time.perf_counter() - start, build_seconds)

    def again_cold(self, proposed: Proposed, seed: int) -> Judged:
        """Each side in a process of its own on the whole model, with inputs that no search has seen."""
        start = time.perf_counter()
        order = replace(
            self._order(proposed.candidate, proposed.against, self.stopping, Purpose.COLD, seed),
            pairing=Pairing.TWO_ENGINES,
            tier=Tier.FAST,
        )
        result = self.engine.measure(order)
        return judged(proposed, self._judge(result), result, time.perf_counter() - start, 0.0)

    def _measured(
        self, proposed: Proposed, stopping: Stopping, purpose: Purpose = Purpose.SEARCH, number: int = 0
    ) -> tuple[Attempt, MeasureResult]:
        order = self._order(proposed.candidate, proposed.against, stopping, purpose, 101 + number)
        result = self.engine.measure(order)
        return self._judge(result), result

    def _build_incumbent(self, incumbent: Candidate) -> None:
        """Known already but in a process of its own, where its files are in the cache."""
        if incumbent != AS_LOADED and incumbent.id not in self._built:
            self.builder.build(incumbent, DEADLINE_SECONDS)
        self._built.add(incumbent.id)

    def _order(
        self, candidate: Candidate, against: Candidate, stopping: Stopping, purpose: Purpose, seed: int
    ) -> Assignment:
        return Assignment(
            incumbent=against,
            candidate=candidate,
            tier=Tier.FAST,
            purpose=purpose,
            rows=self.deployment.shapes.rows,
            seed=seed,
            deadline_seconds=DEADLINE_SECONDS,
            stopping=stopping,
        )

    def _judge(self, result: MeasureResult) -> Attempt:
        return judge(
            result,
            policy=POLICY,
            band=self.band,
            shapes=self.deployment.shapes,
            num_layers=self.deployment.model.num_layers,
        )

    def _band(self) -> Band:
        own = self.engine.measure(
            self._order(AS_LOADED, AS_LOADED, replace(self.stopping, max_rounds=4), Purpose.AA, 7)
        )
        return calibrate(self.engine.reference_noise(), loaded_checks(own), self.deployment.model.dtype, POLICY)


def judged(proposed: Proposed, attempt: Attempt, result: MeasureResult, seconds: float, build_seconds: float) -> Judged:
    low = value = high = None
    if attempt.verdict.is_timed:
        low, value, high = interval_of(attempt)
    return Judged(
        name=proposed.name,
        candidate_id=proposed.candidate.id,
        outcome=outcome_of(attempt),
        seconds=seconds,
        build_seconds=build_seconds,
        low=low,
        value=value,
        high=high,
        rounds=attempt.rounds,
        reason=attempt.reason[:200],
        phases_ms=dict(result.phases_ms),
    )


def hotpass_arm(session: Session, proposals: Sequence[Proposed], report: Report) -> tuple[list[Proposed], list[Judged]]:
    """Arm c: one engine for all, each held against the best so far, as in a campaign. What was proposed before is not measured again.

    Returns the proposals with the incumbents that they were held against, and what became of them.
    """
    seen: set[str] = set()
    posed, found = [], []
    incumbent = AS_LOADED
    for proposed in proposals:
        asked = replace(proposed, against=incumbent)
        judged_one = _duplicate(asked) if asked.candidate.id in seen else session.decide(asked)
        seen.add(asked.candidate.id)
        report(judged_one)
        if judged_one.is_faster:
            incumbent = asked.candidate
        posed.append(asked)
        found.append(judged_one)
    return posed, found


def cold_arm(
    deployment: Deployment, proposals: Sequence[Proposed], cache_dir: str, stopping: Stopping, report: Report
) -> list[Judged]:
    """Arm b: a new process for each, whose engine is loaded, used once and closed; caches on disk are those that arm c has filled."""
    found = []
    for proposed in proposals:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
            orders = {
                "deployment": deployment,
                "proposed": proposed,
                "cache_dir": cache_dir,
                "stopping": stopping,
                "answer": str(answer),
            }
            request.write_text(json.dumps(json_safe(orders)))
            command = [sys.executable, "-m", "benchmarks.experiments.paired", str(request)]
            done = subprocess.run(command, check=False, timeout=600, stdout=subprocess.DEVNULL)
            inside = from_plain(Judged, json.loads(answer.read_text())) if done.returncode == 0 else _ended(proposed)
        found.append(replace(inside, seconds=time.perf_counter() - start))
        report(found[-1])
    return found


def _ended(proposed: Proposed) -> Judged:
    return Judged(
        name=proposed.name,
        candidate_id=proposed.candidate.id,
        outcome=Outcome.FAILED,
        seconds=0.0,
        reason="its process ended",
    )


def _duplicate(proposed: Proposed) -> Judged:
    return Judged(
        name=proposed.name, candidate_id=proposed.candidate.id, outcome=Outcome.DUPLICATE, seconds=0.0, reason="known"
    )


def main() -> None:
    """One candidate of arm b, in this process: `python -m benchmarks.experiments.paired REQUEST`."""
    orders = json.loads(Path(sys.argv[1]).read_text())
    deployment = from_plain(Deployment, orders["deployment"])
    with Session(deployment, orders["cache_dir"], from_plain(Stopping, orders["stopping"])) as session:
        found = session.decide(from_plain(Proposed, orders["proposed"]))
    Path(orders["answer"]).write_text(json.dumps(json_safe(found)))


if __name__ == "__main__":
    main()
