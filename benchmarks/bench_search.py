"""How busy the search keeps its engines, what its driver can take, and what a kill costs: `make bench-search`.

    python -m benchmarks.bench_search [--small] [--skip kills,worth]

1. *busy*: 8 agents that take 20 s a reply (threads; no LLM is asked), 4 fake engines in real time at 1 s an attempt. Share of engine time
   in use after warm-up; the share of attempts that came from agents; the same with agents alone; throughput with agents that never
   answer, over that of a run without agents.
2. *driver*: attempts a second, durable, of 512 fake engines in one process with random candidates; its memory at each tenth, and by
   how much that grows an attempt after the first tenth. It does grow: a search holds each candidate (it must not propose one twice, and
   chains later ones to it) and each attempt as judged (status, report and the live view read them); blocks and outputs are in the log.
3. *tpe*: asks a second of the sampler over 7 places × 6 parts with 200 trials.
4. *mlflow*, *status*: how long the mirror takes to drain a campaign, and `hotpass status` on the driver's log.
5. *kills*: `benchmarks.kill_matrix`.   6. *worth*: composition, Optuna without screening, and chance at equal engine time, three seeds,
   on simulated engines. It shows that the bookkeeping works; it says nothing about real parts or real agents.

A line for each on stderr, one JSON line last on stdout. `--small` is a try of everything at a tenth of the size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.kill_matrix import VICTIMS, kill_matrix
from benchmarks.search_campaigns import (
    PARTS,
    PARTS_PER_PLACE,
    Growth,
    PacedEngine,
    bench_plan,
    fake_engines,
    part,
    run_search,
    scratch,
    thinking,
)
from cluster.journal import FOLDER
from cluster.ledger import open_mirror
from cluster.runs import facts_of
from engines.fake import FakeEngine
from hotpass.records.candidate import AS_LOADED, PartSource
from hotpass.records.measurement import Attempt, Estimate, Purpose, Tier, Verdict
from search.space import Space
from search.study import Study

STATUS_ATTEMPTS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="everything at a tenth of the size")
    parser.add_argument("--skip", default="", help="of busy, driver, mlflow, tpe, kills, worth")
    options = parser.parse_args()
    skip, line = options.skip.split(","), dict[str, Any](bench="search")
    parts = {"busy": busy, "driver": driver, "mlflow": mlflow, "tpe": tpe, "kills": kills, "worth": worth}
    try:
        for name, measure in parts.items():
            if name not in skip:
                began = time.monotonic()
                print(f"{name}: begins", file=sys.stderr, flush=True)
                found = measure(options.small)
                print(f"{name}: {found} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
                line |= found
    except KeyboardInterrupt:
        line["interrupted"] = True
    print(json.dumps(line))


def busy(small: bool) -> dict[str, Any]:
    """Four runs of a minute each (15 s with attempts and replies four times as quick when small)."""
    attempt, reply, length = (0.25, 5.0, 15.0) if small else (1.0, 20.0, 90.0)
    with_agents = _paced(attempt, reply, length, agents=8)
    alone = _paced(attempt, reply, length, agents=8, sampler="none")
    without = _paced(attempt, reply, length, agents=0)
    dead = _paced(attempt, reply, length, agents=8, dead=True)
    return {
        "busy": with_agents["busy"],
        "agent_share": with_agents["agent_share"],
        "busy_agents_only": alone["busy"],
        "dead_llm_throughput": round(dead["attempts"] / without["attempts"], 3),
    }


def _paced(
    attempt: float, reply: float, length: float, *, agents: int, sampler: str = "optuna", dead: bool = False
) -> dict[str, Any]:
    engines = fake_engines(4, attempt)
    with scratch() as folder, thinking(folder, agents, reply, dead=dead):
        warm_up = reply * 1.5 if sampler == "none" else 5 * attempt
        plan = bench_plan(folder, budget=f"{length}s", sampler=sampler)
        ran = run_search(folder, plan, engines, build_ahead=True, agents_alive=agents > 0)
    since, until = ran.began + warm_up, ran.began + min(ran.seconds, length)
    shares = [engine.busy_share(since, until) for engine in engines if isinstance(engine, PacedEngine)]
    rows = [row for row in ran.state.attempts if row.attempt.purpose is Purpose.SEARCH]
    distinct = {row.attempt.candidate_id for row in rows if row.attempt.tier is Tier.FAST}
    by_agents = sum(ran.state.candidates[row.attempt.candidate_id].proposer.startswith("agent:") for row in rows)
    assert len(distinct) == sum(row.attempt.tier is Tier.FAST for row in rows), "a candidate was measured twice"
    return {
        "busy": round(statistics.mean(shares), 3),
        "agent_share": round(by_agents / max(1, len(rows)), 3),
        "attempts": len(rows),
    }


def driver(small: bool) -> dict[str, Any]:
    """512 engines that answer at once; then `status` on the same log."""
    count = 1000 if small else 20_000
    memory = Growth(count // 10)
    with scratch() as folder:
        plan = bench_plan(folder, budget="1000000h", max_attempts=count, sampler="random")
        ran = run_search(folder, plan, fake_engines(512), build_ahead=False, view=memory)
        attempts = ran.state.tally.searched
        status_attempts = _cut(folder, min(attempts, STATUS_ATTEMPTS))
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "cluster.cli", "status", str(folder), "--json"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        status_seconds = time.monotonic() - began
    return {
        "attempts_per_s": round(attempts / ran.seconds, 1),
        "attempts": attempts,
        "memory_mb": [round(mb) for _, mb in memory.seen],
        "memory_kb_per_attempt": memory.slope_kb(),
        "status_seconds_at_10k": round(status_seconds, 2),
        "status_attempts": status_attempts,
    }


def _cut(folder: Path, attempts: int) -> int:
    """The campaign's log as it was after so many attempts; how many it has then."""
    left = attempts
    for path in sorted((folder / FOLDER).glob("*.jsonl")):
        if not left:
            path.unlink()
            continue
        size = 0
        with path.open("rb") as file:
            for line in file:
                size += len(line)
                left -= b'"kind":"attempt"' in line[:100]
                if not left:
                    break
        os.truncate(path, size)
    return attempts - left


def mlflow(small: bool) -> dict[str, Any]:
    """A campaign that MLflow has seen nothing of."""
    with scratch() as folder:
        plan = bench_plan(folder, budget="1000000h", max_attempts=150 if small else 1500, sampler="random")
        ran = run_search(folder, plan, fake_engines(64), build_ahead=False)
        began = time.monotonic()
        open_mirror(folder, facts_of(plan), note=lambda text: print(text, file=sys.stderr)).close()
        seconds = time.monotonic() - began
        drained = ran.state.tally.attempts
    return {"mlflow_drain_s": round(seconds, 1), "mlflow_attempts_per_s": round(drained / seconds, 1)}


def tpe(small: bool) -> dict[str, Any]:
    """7 places × 6 parts, 200 trials told."""
    plan = bench_plan(Path("nowhere"))
    space = Space.build(plan.deployment, FakeEngine().slots(), _seven_places(), applies=lambda source: None)
    study = Study(space, seed=1)
    for number in range(50 if small else 200):
        ask = study.ask()
        assert ask is not None
        value = 1 + 0.001 * ((number * 37) % 200)
        estimate = Estimate(value=value, low=value * 0.99, high=value * 1.01)
        study.tell(
            Attempt(
                candidate_id=ask.candidate.id,
                incumbent_id=AS_LOADED.id,
                tier=Tier.FAST,
                purpose=Purpose.SEARCH,
                verdict=Verdict.INCONCLUSIVE,
                reason="simulated",
                speedup=estimate,
                tokens_per_second=None,
            )
        )
    asks, began = 20, time.monotonic()
    for _ in range(asks):
        study.ask()
    return {"tpe_asks_per_s": round(asks / (time.monotonic() - began), 1)}


def kills(small: bool) -> dict[str, Any]:
    found = kill_matrix(["driver", "disk"] if small else list(VICTIMS), 1 if small else 5)
    return {
        "lost": found["lost"],
        "doubled": found["doubled"],
        "left_running": found["running"],
        "kills": found["kills"],
        "kills_missed": found["missed"],
        "kill_errors": found["errors"],
    }


def worth(small: bool) -> dict[str, Any]:
    """Log of the best fast ratio after equal engine time, mean and standard error over three seeds."""
    seconds = "60s" if small else "600s"
    found: dict[str, list[float]] = {"composed": [], "optuna": [], "random": []}
    for seed in range(3):
        for name in found:
            agents = 2 if name == "composed" else 0
            with scratch() as folder, thinking(folder, agents, 0.5):
                sampler = "random" if name == "random" else "optuna"
                plan = bench_plan(
                    folder, budget="10h", engine_budget=seconds, max_attempts=400, sampler=sampler, seed=seed
                )
                ran = run_search(folder, plan, fake_engines(1), build_ahead=False)
            fast = [row.speedup_vs_loaded.value for row in ran.state.attempts if row.speedup_vs_loaded]
            found[name].append(math.log(max(fast)))
    return {
        "simulated_log_gain": {
            name: [round(statistics.mean(values), 3), round(statistics.stdev(values) / math.sqrt(len(values)), 3)]
            for name, values in found.items()
        }
    }


def _seven_places() -> list[PartSource]:
    more = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return [*PARTS, *(part(f"{child}-{index}", child) for child in more for index in range(PARTS_PER_PLACE))]


if __name__ == "__main__":
    main()
