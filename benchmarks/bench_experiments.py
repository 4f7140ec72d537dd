"""Experiments an hour, three ways: `make bench-experiments`.

    python -m benchmarks.bench_experiments [--small] [--out FILE] [--sample-a 3] [--sample-b 6] [--starts-a 4] [--judgements 20]

An experiment is *decided* when a distinct candidate, proven active, has an interval of at most ±2 % on the full model's
deployment-weighted log step time, or is rejected beyond that bound (`benchmarks/experiments/deciding.py`). Wrong ones, build failures,
crashes and duplicates are counted apart. Forty candidates (`candidates.py`), three arms:

  a  a cold vLLM for each start, eager (its quicker start) with warm disk caches, a start being the unit of its interval. Sampled: some
     counterparts of the list for vLLM's tree give the seconds of a start and the spread between starts of one program; from these
     follow the starts that each candidate of the list takes to be decided, given its effect in arm c (`projected`, said as such). Beside
     it the rate if two starts, the least that have an interval, decided each: the most that arm a could reach, `at_most`
  b  a cold process of the decoder engine for each candidate, warm page and compile caches, the same cuts and early stopping; sampled by
     chance within two strata (decided in arm c, or not), each weighted by its size
  c  hotpass: one engine, all forty; reload, preparation, proof, crashes, promotion and A/A are in its time. Building stands beside it,
     in core hours, as arm b finds everything built; on two cores builders stand still during windows, so that nothing of it is hidden
     behind measurements (factor 1), and `c_with_building` is the rate with its seconds inside

In every arm a candidate is held against the best so far, as in a campaign: the incumbent is replaced by what is faster beyond its
interval. So most of the list is decided by being rejected, and the rest by a narrow interval; both numbers are printed.

The candidates of arm a are also hot-swapped into one vLLM that stays up (`live-vllm`): a factor beside, not an arm.
Then judgements of arm c, drawn by chance, are made again cold on the full model; below 95 % of kept signs no ratio is printed. Where the
fast tier is the whole model (small models, large caches) there is no transfer between tiers, and that is said. Progress on stderr, partial
results in --out after every candidate, one JSON line last on stdout. Two cores: run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.experiments.candidates import Proposed, for_vllm, forty
from benchmarks.experiments.cold_vllm import ColdVllm, vllm_arm
from benchmarks.experiments.deciding import (
    STOPPING,
    Judged,
    counted,
    decided_per_hour,
    least_starts,
    projected_starts,
    spread_of_starts,
)
from benchmarks.experiments.paired import Session, cold_arm, hotpass_arm
from benchmarks.shapes import deployment_of, prepare_model, probe_hardware
from engines.prepare.tiny import make_tiny_model
from engines.threading_env import usable_cores
from hotpass.canonical import to_plain
from hotpass.decode import json_safe
from hotpass.errors import InputError
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Stopping
from hotpass.records.shapes import Phase, ShapeRow

ROWS = (
    ShapeRow(
        phase=Phase.DECODE, num_seqs=1, query_tokens=1, context_mean=256, context_max=256, steps_share=0.58, tokens_share=0.3
    ),
    ShapeRow(
        phase=Phase.DECODE, num_seqs=4, query_tokens=4, context_mean=256, context_max=256, steps_share=0.4, tokens_share=0.69
    ),
    ShapeRow(
        phase=Phase.PREFILL, num_seqs=1, query_tokens=128, context_mean=0, context_max=0, steps_share=0.02, tokens_share=0.01
    ),
)  # fmt: skip
"""Short chats of one to four clients."""

KEPT = 0.95
"""Share of signs that must hold."""


@dataclass
class Progress:
    """What is known so far; written after every candidate, so that a run cut short still tells it."""

    out: Path
    known: dict[str, Any] = field(default_factory=dict)

    def note(self, key: str, value: Any) -> None:
        self.known[key] = value
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(json_safe(to_plain(self.known)), indent=1))

    def judged(self, arm: str, found: Judged) -> None:
        self.note(arm, [*self.known.get(arm, []), to_plain(found)])
        span = f" [{found.low:+.3f}, {found.high:+.3f}]" if found.low is not None and found.high is not None else ""
        say(
            f"{arm} · {found.name}: {found.outcome}{span} {found.rounds or ''} in {found.seconds:.1f} s {found.reason[:70]}"
        )


def main() -> None:
    options = _arguments()
    with tempfile.TemporaryDirectory(prefix="hotpass-experiments-") as folder:
        progress = Progress(out=Path(options.out))
        deployment = _deployment(options.small, Path(folder))
        line = run(deployment, options, Path(folder), progress)
    progress.note("line", line)
    print(json.dumps(json_safe(line)))


def run(deployment: Deployment, options: argparse.Namespace, folder: Path, progress: Progress) -> dict[str, Any]:
    proposals = forty(deployment.model.dtype)
    stopping = STOPPING
    if options.small:
        proposals, stopping = proposals[1:6], replace(STOPPING, max_rounds=6)
    cache = str(folder / "cache")
    start = time.perf_counter()
    with Session(deployment, cache, stopping) as session:
        say(f"c · loaded in {session.load_seconds:.1f} s, layers {[len(cut) for cut in session.engine.cuts]}")
        proposals, of_c = hotpass_arm(session, proposals, lambda found: progress.judged("c", found))
        held_c = time.perf_counter() - start
        whole = len(session.engine.cuts) == 1
        built = sum(item.build_seconds for item in of_c)
        rates = {
            "c": decided_per_hour(of_c, held_c - built),
            "c_with_building": decided_per_hour(of_c, held_c),
        }
        progress.note("decided_per_hour", rates)
        cold = _audit(session, proposals, of_c, options.judgements, progress)
    rate_b, seconds_b = _arm_b(deployment, proposals, of_c, cache, stopping, options.sample_b, progress)
    of_a, starts = _arm_a(deployment, of_c, folder, options, progress)
    of_v = _live_vllm(deployment, cache, stopping, options.sample_a, progress)
    rate_a, most_a = of_a.get("projected"), of_a.get("at_most")
    known: dict[str, float | None] = {"a": rate_a, "a_at_most": most_a, "b": rate_b, **rates}
    kept = sum(cold) / len(cold) if cold else 0.0
    trusted = bool(cold) and kept >= KEPT
    return {
        "bench": "experiments",
        "c_over_a": rates["c"] / rate_a if trusted and rate_a else None,
        "c_over_a_is": "projected",
        "c_over_a_at_least": rates["c"] / most_a if trusted and most_a else None,
        "c_over_b": rates["c"] / rate_b if trusted and rate_b else None,
        "decided_per_hour": known,
        "factors": _factors(of_c, held_c, session.load_seconds, starts, seconds_b, of_v),
        "a": of_a,
        "sign_kept": kept,
        "judgements_again": len(cold),
        "judgements_not_timed": progress.known.get("signs", {}).get("not_timed", 0),
        "counts_c": counted(of_c),
        "decided_by_interval_c": sum(item.outcome.is_decided and item.is_narrow for item in of_c),
        "rejected_c": sum(item.outcome.is_decided and not item.is_narrow for item in of_c),
        "held_seconds_c": held_c,
        "builder_core_hours_c": built / 3600,
        "fast_tier_is_the_whole_model": whole,
        "model": deployment.model.name,
        "cores": usable_cores(),
        "small": bool(options.small),
    }


def _audit(
    session: Session, proposals: list[Proposed], found: list[Judged], count: int, progress: Progress
) -> list[bool]:
    """Judgements drawn by chance, made again cold until as many were timed as asked: for each whether its sign held."""
    decided = [(p, j) for p, j in zip(proposals, found, strict=True) if j.outcome.is_decided]
    drawn = random.Random(5).sample(decided, len(decided))
    needed = max(count, -(-len(decided) // 20))
    kept: list[bool] = []
    for number, (proposed, before) in enumerate(drawn):
        if len(kept) == needed:
            break
        again = session.again_cold(proposed, 9000 + number)
        progress.judged("cold", again)
        if again.value is not None and again.low is not None and again.high is not None:
            kept.append(_sign_held(before.sign, again.low, again.value, again.high))
        progress.note("signs", {"kept": sum(kept), "of": len(kept), "not_timed": number + 1 - len(kept)})
    return kept


def _sign_held(sign: int, low: float, value: float, high: float) -> bool:
    """A claim of faster or slower: the cold mean is on the same side. A claim of no change: the cold interval meets ±2 %."""
    return sign * value > 0 if sign else low <= 0.02 and high >= -0.02


def _arm_b(
    deployment: Deployment,
    proposals: list[Proposed],
    of_c: list[Judged],
    cache: str,
    stopping: Stopping,
    count: int,
    progress: Progress,
) -> tuple[float, float]:
    """(decided an hour, mean seconds of a decided one) of the stratified sample, weighted to the whole list."""
    strata = {
        True: [p for p, j in zip(proposals, of_c, strict=True) if j.outcome.is_decided],
        False: [p for p, j in zip(proposals, of_c, strict=True) if not j.outcome.is_decided and j.seconds],
    }
    draw = random.Random(11)
    decided = seconds = 0.0
    mean_decided = 0.0
    for stratum, members in strata.items():
        size = min(len(members), count if stratum else max(1, count // 3))
        if not size:
            continue
        say(f"b · {size} of {len(members)} that arm c {'decided' if stratum else 'did not decide'}")
        chosen = draw.sample(members, size)
        sampled = cold_arm(deployment, chosen, cache, stopping, lambda found: progress.judged("b", found))
        weight = len(members) / size
        decided += weight * sum(item.outcome.is_decided for item in sampled)
        seconds += weight * sum(item.seconds for item in sampled)
        if stratum:
            mean_decided = sum(item.seconds for item in sampled) / size
    rate = decided / seconds * 3600 if seconds else 0.0
    progress.note("decided_per_hour", {**progress.known["decided_per_hour"], "b": rate})
    return rate, mean_decided


def _arm_a(
    deployment: Deployment, of_c: list[Judged], folder: Path, options: argparse.Namespace, progress: Progress
) -> tuple[dict[str, float | None], list[dict[str, float]]]:
    """(decided an hour, phases of every start); nothing where vLLM is not installed."""

    def started(name: str, phases: dict[str, float]) -> None:
        progress.note("starts_a", [*progress.known.get("starts_a", []), {"who": name, **phases}])
        say(f"a · start of {name}: {phases['seconds']:.1f} s, log step time {phases['log_step']:+.3f}")

    try:
        arm = ColdVllm(
            deployment=deployment,
            threads=usable_cores(),
            most_starts=options.starts_a,
            folder=folder / "vllm",
            on_start=started,
        )
    except InputError as error:
        say(f"a · left out: {error}")
        return {}, []
    sampled = vllm_arm(arm, for_vllm()[: options.sample_a], lambda found: progress.judged("a", found))
    rates = rates_of_a(of_c, arm.groups, [item["seconds"] for item in arm.starts])
    progress.note("a", {**rates, "sampled": counted(sampled)})
    return rates, arm.starts


def rates_of_a(of_c: list[Judged], groups: list[list[float]], seconds: list[float]) -> dict[str, float | None]:
    """Decided an hour in arm a, projected to the whole list and at most; with what they follow from."""
    decided = sum(item.outcome.is_decided for item in of_c)
    each, sigma = _median(seconds), spread_of_starts(groups)
    if not each or sigma is None:
        return {}
    starts = projected_starts(of_c, sigma)
    return {
        "projected": decided / (starts * each) * 3600,
        "at_most": decided / (least_starts(of_c) * each) * 3600,
        "spread_of_starts": sigma,
        "projected_starts": float(starts),
    }


def _live_vllm(deployment: Deployment, cache: str, stopping: Stopping, count: int, progress: Progress) -> list[Judged]:
    """The candidates of arm a once more, hot-swapped into one vLLM that stays up: what staying up is worth on the same engine."""
    try:
        with Session(deployment, cache, stopping, kind="vllm") as session:
            return hotpass_arm(session, for_vllm()[:count], lambda found: progress.judged("live-vllm", found))[1]
    except InputError:
        return []


def _factors(
    of_c: list[Judged],
    held: float,
    load_seconds: float,
    starts: list[dict[str, float]],
    seconds_b: float,
    of_v: list[Judged],
) -> dict[str, float | None]:
    """What the ratios are made of: medians of seconds, and their quotients."""
    decided = [item for item in of_c if item.outcome.is_decided]
    each_c = _median([item.seconds for item in decided])
    start_a = _median([item["seconds"] for item in starts])
    return {
        "seconds_a_decision_c": each_c,
        "seconds_a_decision_b": seconds_b or None,
        "seconds_a_start_a": start_a,
        "seconds_a_decision_live_vllm": _median([item.seconds for item in of_v if item.outcome.is_decided]),
        "vllm_load_seconds": _median([item["load_seconds"] for item in starts]),
        "load_share_c": load_seconds / held,
        "reload_ms_c": _median([_phases(item, "install", "restore", "clean") for item in decided]),
        "measure_ms_c": _median([_phases(item, "measure") for item in decided]),
        "start_a_over_decision_c": start_a / each_c if start_a and each_c else None,
        "decision_b_over_decision_c": seconds_b / each_c if seconds_b and each_c else None,
        "building": 1.0,
    }


def _phases(item: Judged, *names: str) -> float:
    return sum(item.phases_ms.get(name, 0.0) for name in names)


def _median(values: list[float]) -> float | None:
    from statistics import median

    return median(values) if values else None


def _deployment(small: bool, folder: Path) -> Deployment:
    hardware = probe_hardware("cpu")
    if not small:
        return deployment_of(prepare_model("smollm2-135m"), hardware, ROWS)
    tiny = make_tiny_model(folder / "tiny", layers=8, hidden=256, heads=8, kv_heads=4)
    return deployment_of(prepare_model(str(tiny), cache_dir=folder / "models"), hardware, ROWS)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="a tiny model and five candidates: a trial of the whole path"
    )
    parser.add_argument("--out", default="campaigns/bench-experiments.json", help="partial results as they come")
    parser.add_argument("--sample-a", type=int, default=3, help="candidates of arm a (three exist)")
    parser.add_argument("--starts-a", type=int, default=4, help="starts of a candidate in arm a, at most")
    parser.add_argument(
        "--sample-b", type=int, default=6, help="decided candidates of arm b; a third as many of the others"
    )
    parser.add_argument("--judgements", type=int, default=20, help="judgements made again cold, at least")
    options = parser.parse_args()
    if options.small:
        options.sample_a, options.starts_a, options.sample_b, options.judgements = 1, 2, 1, 2
    return options


def say(text: str) -> None:
    print(f"bench-experiments · {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
