"""How often the engine claims an effect that is not there, and finds one that is: `make bench-aa`.

    python -m benchmarks.bench_aa [--rounds 200] [--planted 50] [--small]

A/A: a copy of the deployment as loaded against another copy under another id, put on by a reload each time and in a new child every
tenth time. The test is designed at 2 % (`Stopping.alpha`), so at most 9 claims in 200 are expected in all but 1 of 100 runs. Planted: a
copy whose steps take 1.05 times as long, half of them as the candidate and half as the incumbent of a plain copy; rounds go on until the
interval is ±2 %, which finds 5 % with more than 97 % power (`hotpass.stats.rounds_for` says in how many). Everything takes the way of a
campaign: `measure`, then `judge` by the default policy; what that rejects is counted apart. Lines on stderr; one JSON line last on stdout,
and one after every ten comparisons (`partial: true`), so that a run cut short has said what it found.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines_at_hand import engine_at_hand
from benchmarks.planted import copy
from benchmarks.shapes import DECODE_1, DECODE_8
from engines.decoder_engine import DecoderEngine
from hotpass.decode import json_safe
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Assignment, Attempt, Purpose, Stopping, Tier, Verdict
from hotpass.stats import rounds_for, rounds_of, weighted_round
from verification.numerics import Band, calibrate
from verification.policy import Policy
from verification.verdict import judge

EFFECT, POWER = 1.05, 0.97
NEW_CHILD_EVERY = 10
TOLD_EVERY = 10
A_A = Stopping(max_rounds=24)
PLANTED = Stopping(max_rounds=120)


@dataclass(kw_only=True, slots=True)
class Tally:
    """What came of comparisons of one kind."""

    verdicts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    sigmas: list[float] = field(default_factory=list)
    """Standard deviation of the rounds of a comparison."""
    speedups: list[float] = field(default_factory=list)
    right: int = 0
    """How many had the verdict that was planted."""

    @property
    def count(self) -> int:
        return len(self.seconds)

    def as_json(self) -> dict[str, Any]:
        return {
            "verdicts": dict(self.verdicts),
            "median_seconds": statistics.median(self.seconds) if self.seconds else None,
            "median_rounds": statistics.median(self.rounds) if self.rounds else None,
            "median_sigma": statistics.median(self.sigmas) if self.sigmas else None,
            "median_speedup": statistics.median(self.speedups) if self.speedups else None,
        }


class Comparisons:
    """Of candidates on one engine, judged as a campaign would."""

    def __init__(self, engine: DecoderEngine, deployment: Deployment) -> None:
        self._engine, self._deployment, self._policy = engine, deployment, Policy()
        self._band: Band = calibrate(engine.reference_noise(), (), "float32", self._policy)

    def compare(self, tally: Tally, incumbent: Candidate, candidate: Candidate, stopping: Stopping) -> Attempt:
        assignment = Assignment(
            incumbent=incumbent,
            candidate=candidate,
            tier=Tier.FAST,
            purpose=Purpose.SEARCH,
            rows=self._deployment.shapes.rows,
            seed=time.time_ns() % 2**31,
            deadline_seconds=600.0,
            stopping=stopping,
        )
        start = time.perf_counter()
        result = self._engine.measure(assignment)
        attempt = judge(
            result,
            policy=self._policy,
            band=self._band,
            shapes=self._deployment.shapes,
            num_layers=self._deployment.model.num_layers,
        )
        tally.seconds.append(time.perf_counter() - start)
        tally.verdicts[attempt.verdict.value] += 1
        ratios = [weighted_round(group) for group in rounds_of(result.blocks)]
        if attempt.speedup is None:
            _say(f"not timed: {attempt.reason}")
        else:
            tally.rounds.append(attempt.rounds)
            tally.speedups.append(attempt.speedup.value)
            tally.sigmas += [statistics.stdev(ratios)] if len(ratios) > 1 else []
        return attempt


def main() -> None:
    options = _arguments()
    same, planted = Tally(), Tally()
    with engine_at_hand((DECODE_1, DECODE_8), small=options.small) as (engine, deployment):
        comparisons = Comparisons(engine, deployment)
        for number in range(options.rounds):
            if number % NEW_CHILD_EVERY == NEW_CHILD_EVERY - 1:
                engine.renew()
            comparisons.compare(same, copy(0), copy(1 + number), A_A)
            _progress("A/A", number + 1, options, same, planted)
        for number, (incumbent, candidate, expected) in enumerate(_planted(options.planted)):
            planted.right += comparisons.compare(planted, incumbent, candidate, PLANTED).verdict is expected
            _progress("planted", number + 1, options, same, planted)
    _print_line(options, same, planted, partial=False)


def _print_line(options: argparse.Namespace, same: Tally, planted: Tally, *, partial: bool) -> None:
    """What is known now. Goals are held against what was done so far."""
    sigmas = planted.sigmas or same.sigmas
    claims = same.verdicts[Verdict.FASTER] + same.verdicts[Verdict.SLOWER]
    line = {
        "bench": "aa",
        "small": options.small,
        "partial": partial,
        "comparisons": same.count,
        "of_comparisons": options.rounds,
        "claims": claims,
        "aa": same.as_json(),
        "planted": planted.count,
        "of_planted": options.planted,
        "right": planted.right,
        "planted_effect": planted.as_json(),
        "rounds_for_5_percent_at_97": rounds_for(math.log(EFFECT), statistics.median(sigmas), PLANTED.alpha, POWER)
        if sigmas
        else None,
        "goals": {
            "claims <= 9 of 200": claims <= 0.045 * same.count if same.count else None,
            "right >= 45 of 50": planted.right >= 0.9 * planted.count if planted.count else None,
        },
    }
    print(json.dumps(json_safe(line)), flush=True)


def _planted(count: int) -> Iterator[tuple[Candidate, Candidate, Verdict]]:
    """Slowdowns and speedups in turn."""
    for number in range(count):
        if number % 2:
            yield copy(0), copy(1 + number, EFFECT), Verdict.SLOWER
        else:
            yield copy(0, EFFECT), copy(1 + number), Verdict.FASTER


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="A/A comparisons")
    parser.add_argument("--planted", type=int, default=50, help="comparisons with a planted effect")
    parser.add_argument("--small", action="store_true", help="a tiny model: to try the benchmark, not to read it")
    return parser.parse_args()


def _progress(what: str, done: int, options: argparse.Namespace, same: Tally, planted: Tally) -> None:
    total, tally = (options.planted, planted) if what == "planted" else (options.rounds, same)
    if done % TOLD_EVERY == 0 or done == total:
        median = statistics.median(tally.seconds)
        _say(f"{what} {done} of {total}: {dict(tally.verdicts)}, {median:.1f} s each (median)")
        _print_line(options, same, planted, partial=True)


def _say(text: str) -> None:
    print(f"bench-aa · {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
