"""Whole campaigns on the fake engine: what is found, what is refused, what survives an interrupt or a kill."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.campaign import Interrupted, Running, run_campaign
from cluster.events import read_events
from cluster.journal import FOLDER, read_state
from cluster.plan import Plan
from cluster.ports import LocalEngine, View
from engines.fake import FakeEngine, step_time_from_costs
from hotpass.errors import InputError, MachineError
from hotpass.records.candidate import AS_LOADED, Candidate, PartSource
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import (
    Assignment,
    Failure,
    FailureKind,
    MeasureResult,
    OutputCheck,
    Purpose,
    Tier,
    Verdict,
)
from tests.cluster.campaigns import FACTORS, fake, machines_with, make_plan, make_running, part

KEYS = {"schema", "campaign", "deployment", "attempts", "attempts_per_hour", "best", "gates", "verdict"}
BEST_KEYS = {
    "candidate", "purpose", "numerics", "tokens_per_s", "bound_fraction",
    "speedup_vs_loaded", "speedup_vs_best_same_class", "speedup_vs_best_as_accurate",
}  # fmt: skip


def test_campaign_finds_the_composition_and_claims_only_the_cold_number(tmp_path: Path) -> None:
    result = run_campaign(make_running(tmp_path / "c"))
    assert result.keys() >= KEYS
    assert result["best"].keys() >= BEST_KEYS
    assert result["verdict"] == "faster"
    assert result["best"]["purpose"] == "cold"
    assert result["best"]["speedup_vs_loaded"]["value"] == pytest.approx(1 / 0.56, rel=0.02)
    low, high = result["best"]["speedup_vs_loaded"]["ci95"]
    assert low < 1 / 0.56 < high
    assert set(result["gates"].values()) == {"pass"}
    assert json.loads((tmp_path / "c" / "result.json").read_text()) == result
    state = read_state(tmp_path / "c")
    assert state.winner is not None
    assert set(state.candidates[state.winner["candidate_id"]].parts) == {"quick-mlp", "quick-attention"}
    cold = [row.attempt for row in state.attempts if row.attempt.purpose is Purpose.COLD]
    assert all(attempt.incumbent_id == AS_LOADED.id for attempt in cold)


def test_as_loaded_is_measured_against_itself_and_the_baseline_beside_it(tmp_path: Path) -> None:
    run_campaign(make_running(tmp_path / "c", max_attempts=3))
    state = read_state(tmp_path / "c")
    own = [row.attempt for row in state.attempts if row.attempt.purpose is Purpose.AA]
    assert [attempt.candidate_id for attempt in own] == [AS_LOADED.id]
    assert own[0].speedup is not None
    assert own[0].speedup.value == pytest.approx(1.0, abs=0.015)
    assert [row.name for row in state.baselines] == ["simulated-loop"]
    assert state.baselines[0].speedup.value == pytest.approx(1 / 1.05, rel=0.02)
    assert state.baselines[0].speedup.kind == "simulated"


def test_a_crashing_candidate_is_a_row_and_the_search_goes_on(tmp_path: Path) -> None:
    run_campaign(make_running(tmp_path / "c"))
    state = read_state(tmp_path / "c")
    crashed = [row.attempt for row in state.attempts if "crash-mlp" in state.label_of(row.attempt.candidate_id)]
    assert crashed
    assert {attempt.verdict for attempt in crashed} == {Verdict.FAILED}
    assert "SIGSEGV" in crashed[0].reason
    assert state.rejected()["failed"] == len(crashed)


def test_no_candidate_is_measured_twice_on_one_tier(tmp_path: Path) -> None:
    run_campaign(make_running(tmp_path / "c"))
    keys = Counter(
        (row.attempt.candidate_id, row.attempt.incumbent_id, row.attempt.tier, row.attempt.purpose)
        for row in read_state(tmp_path / "c").attempts
    )
    assert keys.most_common(1)[0][1] == 1


def test_a_wrong_candidate_never_wins(tmp_path: Path) -> None:
    def wrong(candidate: Candidate) -> float:
        return 0.5 if "quick-mlp" in candidate.label else (1e-5 if candidate.parts else 0.0)

    result = run_campaign(make_running(tmp_path / "c", engine=lambda: fake(logit_error=wrong)))
    state = read_state(tmp_path / "c")
    assert "quick-mlp" not in result["best"]["label"]
    assert result["best"]["speedup_vs_loaded"]["value"] == pytest.approx(1 / 0.8, rel=0.02)
    assert state.rejected()["incorrect"] > 0


def test_without_anything_faster_there_is_no_winner(tmp_path: Path) -> None:
    slow = (part("slow-norm", "input_layernorm"),)
    result = run_campaign(make_running(tmp_path / "c", parts=slow))
    assert result["best"] is None
    assert result["verdict"] == "inconclusive"
    assert not (tmp_path / "c" / "release").exists()
    assert "tried" in read_state(tmp_path / "c").stop_reason


def test_max_attempts_bounds_the_search(tmp_path: Path) -> None:
    run_campaign(make_running(tmp_path / "c", max_attempts=4))
    searched = [row for row in read_state(tmp_path / "c").attempts if row.attempt.purpose is Purpose.SEARCH]
    assert len(searched) == 4


class StopsAt(LocalEngine):
    """Raises what it is given instead of taking its n-th order."""

    def __init__(self, port: LocalEngine, order: int, error: BaseException) -> None:
        super().__init__(port.server)
        self.left = order
        self.error = error

    def submit(self, assignment):  # type: ignore[no-untyped-def]
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().submit(assignment)


def interrupted_campaign(folder: Path, order: int = 8) -> Running:
    """One that was stopped by Ctrl-C after it had handed out an order."""
    running = make_running(folder)
    running.open_machines = machines_with(fake, lambda port: StopsAt(port, order, KeyboardInterrupt()))
    with pytest.raises(Interrupted, match="go on with: hotpass compile --resume") as caught:
        run_campaign(running)
    assert caught.value.exit_code == 130
    return running


def test_an_interrupted_campaign_resumes_and_counts_each_attempt_once(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    interrupted_campaign(folder)
    before = read_state(folder)
    assert len(before.attempts) == 7
    assert len(before.open_orders) == 1
    result = run_campaign(make_running(folder))
    after = read_state(folder)
    assert [row.attempt for row in after.attempts[:7]] == [row.attempt for row in before.attempts]
    assert len({row.assignment for row in after.attempts}) == len(after.attempts)
    interrupted_id = next(iter(before.open_orders.values())).candidate_id
    assert len([row for row in after.attempts_of(interrupted_id) if row.attempt.tier is Tier.FAST]) >= 1
    assert result["attempts"] == len(after.search_attempts())
    assert after.decisions["start"] == 2
    assert after.decisions["interrupted"] == 1
    assert not [row for row in after.attempts if row.attempt.purpose is Purpose.REMEASURE], "nothing is measured again"


def test_the_budget_counts_all_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    interrupted_campaign(folder)
    used = read_state(folder).elapsed_seconds
    run_campaign(make_running(folder))
    starts = [
        event.payload["clock_seconds"]
        for event in read_events(folder / FOLDER)
        if event.kind == "decision" and event.payload["decision"] == "start"
    ]
    assert starts == [0.0, pytest.approx(used, abs=0.01)]


def test_a_finished_campaign_is_not_run_again(tmp_path: Path) -> None:
    first = run_campaign(make_running(tmp_path / "c", max_attempts=3))
    events = (tmp_path / "c" / FOLDER / "000001.jsonl").read_bytes()
    assert run_campaign(make_running(tmp_path / "c", max_attempts=3)) == first
    assert (tmp_path / "c" / FOLDER / "000001.jsonl").read_bytes() == events


def test_a_halted_campaign_ends_as_an_interrupted_one(tmp_path: Path) -> None:
    running = make_running(tmp_path / "c")
    running.halt.set()
    with pytest.raises(Interrupted):
        run_campaign(running)
    assert read_state(tmp_path / "c").decisions["interrupted"] == 1


def test_one_machine_error_costs_an_order_three_in_a_row_the_campaign(tmp_path: Path) -> None:
    class Unsteady(LocalEngine):
        left = 2

        def submit(self, assignment):  # type: ignore[no-untyped-def]
            if assignment.purpose is Purpose.SEARCH and self.left:
                self.left -= 1
                self.server.engine.measure = self.broken
            else:
                self.server.engine.__dict__.pop("measure", None)
            return super().submit(assignment)

        def broken(self, assignment):  # type: ignore[no-untyped-def]
            raise MachineError("the bus is on fire")

    running = make_running(tmp_path / "c", max_attempts=3)
    running.open_machines = machines_with(fake, lambda port: Unsteady(port.server))
    assert run_campaign(running)["verdict"] == "faster"
    Unsteady.left = 3
    broken = make_running(tmp_path / "d", max_attempts=3)
    broken.open_machines = running.open_machines
    with pytest.raises(MachineError, match="3 machine errors in a row, the last one: the bus is on fire"):
        run_campaign(broken)


def test_two_processes_never_write_one_campaign(tmp_path: Path) -> None:
    from cluster.events import EventLog

    with EventLog.open(tmp_path / "c" / FOLDER):
        with pytest.raises(InputError, match=f"already written by this process \\({os.getpid()}\\)"):
            run_campaign(make_running(tmp_path / "c"))


def test_what_a_finished_campaign_had_not_written_or_mirrored_yet_is_when_it_is_resumed(tmp_path: Path) -> None:
    folder, followed = tmp_path / "c", list[bool]()
    result = run_campaign(make_running(folder, max_attempts=3))
    (folder / "report.html").unlink()
    (folder / "result.json").unlink()

    @contextlib.contextmanager
    def mirrored(plan: Plan, folder: Path, view: View) -> Iterator[None]:
        yield
        followed.append((folder / "report.html").is_file())

    running = make_running(folder, max_attempts=3)
    running.mirrored = mirrored
    assert run_campaign(running) == result
    assert json.loads((folder / "result.json").read_text()) == result
    assert followed == [True], "MLflow gets the report too"


def test_a_killed_campaign_resumes_from_its_log(tmp_path: Path) -> None:
    """SIGKILL in the middle of a measurement: everything acknowledged is there once, and the count goes on."""
    script = tmp_path / "victim.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            from pathlib import Path
            sys.path[:0] = sys.argv[2:]
            from tests.cluster.campaigns import FACTORS, fake, machines_with, make_running
            from cluster.campaign import run_campaign
            from cluster.ports import LocalEngine

            class Dies(LocalEngine):
                left = 9
                def submit(self, assignment):
                    self.left -= 1
                    if not self.left:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return super().submit(assignment)

            running = make_running(Path(sys.argv[1]))
            running.open_machines = machines_with(fake, lambda port: Dies(port.server))
            run_campaign(running)
            """
        )
    )
    folder = tmp_path / "c"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, str(script), str(folder), str(root)], check=False)
    assert done.returncode == -signal.SIGKILL
    before = read_state(folder)
    assert len(before.attempts) == 8
    result = run_campaign(make_running(folder))
    after = read_state(folder)
    assert [row.attempt for row in after.attempts[:8]] == [row.attempt for row in before.attempts]
    assert result["attempts"] == len({row.assignment for row in after.search_attempts()})
    assert result["verdict"] == "faster"


def test_the_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    from cluster.plan import read_plan, write_plan

    plan = make_plan(tmp_path / "c")
    write_plan(tmp_path / "c", plan)
    assert read_plan(tmp_path / "c") == plan
    with pytest.raises(InputError, match=r"has no campaign\.json"):
        read_plan(tmp_path)


def test_an_interrupt_while_the_engine_loads_is_recorded_too(tmp_path: Path) -> None:
    class Slow(FakeEngine):
        def load(self, deployment: Deployment, tier: Tier) -> Mapping[str, float]:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="stopped after 0 attempts"):
        run_campaign(make_running(tmp_path / "c", engine=Slow))
    assert read_state(tmp_path / "c").decisions == {"interrupted": 1}
    assert run_campaign(make_running(tmp_path / "c", max_attempts=2))["verdict"] == "faster"


def test_the_first_large_step_is_taken_on_the_fast_tier_later_ones_are_replayed(tmp_path: Path) -> None:
    factors = {"quick-mlp": 0.6, "quick-attention": 0.6, "slow-norm": 1.2}
    run_campaign(make_running(tmp_path / "c", engine=lambda: fake(factors)))
    decided = [e.payload for e in read_events(tmp_path / "c" / FOLDER) if e.kind == "decision"]
    incumbents = [payload["why"] for payload in decided if payload["decision"] == "incumbent"]
    assert incumbents[0].startswith("decisively faster than as loaded")
    state = read_state(tmp_path / "c")
    slow = [row.attempt for row in state.attempts if row.attempt.tier is Tier.SLOW]
    assert all(attempt.incumbent_id != AS_LOADED.id for attempt in slow)
    assert len(slow) == state.decisions["promote"] >= 1
    assert len(incumbents) == 1 + sum(attempt.verdict in (Verdict.FASTER, Verdict.INCONCLUSIVE) for attempt in slow)


def test_failures_with_nothing_in_common_have_the_machine_checked(tmp_path: Path) -> None:
    """Every candidate fails: after six in a row, as loaded is measured against itself before the next is tried."""

    def fails(candidate: Candidate) -> Failure | None:
        return Failure(kind=FailureKind.CRASH, message="SIGBUS") if candidate.parts or candidate.settings else None

    run_campaign(make_running(tmp_path / "c", engine=lambda: fake(behaviour=fails)))
    state = read_state(tmp_path / "c")
    purposes = [row.attempt.purpose for row in state.attempts]
    assert state.decisions["check"] >= 1
    assert purposes[0] is Purpose.AA
    assert Purpose.AA in purposes[6:]


def test_a_deployment_that_cannot_be_measured_is_a_machine_error(tmp_path: Path) -> None:
    def fails(candidate: Candidate) -> Failure | None:
        return Failure(kind=FailureKind.CRASH, message="SIGBUS")

    class Mute(FakeEngine):
        def reference_noise(self) -> list[OutputCheck]:
            return []

    with pytest.raises(MachineError, match="the deployment as loaded cannot be measured: SIGBUS"):
        run_campaign(make_running(tmp_path / "c", engine=lambda: Mute("fake-0", behaviour=fails)))


def test_a_campaign_is_not_resumed_in_another_environment(tmp_path: Path) -> None:
    """Threads or versions that differ make measurements that cannot be chained."""

    class Elsewhere(FakeEngine):
        def measure(self, assignment: Assignment) -> MeasureResult:
            result = super().measure(assignment)
            return replace(result, environment=replace(result.environment, threads=4))

    interrupted_campaign(tmp_path / "c")
    with pytest.raises(InputError, match="was measured in another environment \\(threads 1 then, 4 now\\)"):
        run_campaign(make_running(tmp_path / "c", engine=lambda: Elsewhere("fake-0")))


def test_a_disturbed_attempt_gets_one_second_look(tmp_path: Path) -> None:
    """On a shared machine the best candidate may be met at a bad moment; one that disturbs again is rejected."""
    looks: Counter[str] = Counter()

    def disturbed(assignment: Assignment) -> float:
        names = [use.source.name for use in assignment.candidate.parts]
        if names not in (["quick-mlp"], ["quick-attention"]) or assignment.tier is Tier.SLOW:
            return 1.0
        looks[names[0]] += 1
        return 1.4 if names == ["quick-mlp"] or looks[names[0]] == 1 else 1.0

    run_campaign(make_running(tmp_path / "c", engine=lambda: fake(disturbed=disturbed)))
    state = read_state(tmp_path / "c")
    seen = {
        name: [
            (r.attempt.purpose, r.attempt.verdict)
            for r in state.search_attempts()
            if state.label_of(r.attempt.candidate_id) == name
        ][:2]
        for name in ("quick-mlp", "quick-attention")
    }
    assert seen["quick-mlp"] == [(Purpose.SEARCH, Verdict.INVALID), (Purpose.REMEASURE, Verdict.INVALID)]
    assert seen["quick-attention"][:2] == [(Purpose.SEARCH, Verdict.INVALID), (Purpose.REMEASURE, Verdict.FASTER)]


def serving_campaign(folder: Path, **factors: float) -> Running:
    """Four clients; each setting of the serving loop has a factor on the fake's replays alone, as on real ones."""
    running = make_running(folder)
    deployment = running.plan.deployment
    shapes = replace(deployment.shapes, concurrency=4)
    running.plan = replace(running.plan, deployment=replace(deployment, concurrency=4, shapes=shapes))
    by_parts = step_time_from_costs(20.0, FACTORS)

    class Served(FakeEngine):
        def measure(self, assignment: Assignment) -> MeasureResult:
            replayed = step_time_from_costs(20.0, {**FACTORS, **factors})
            self.step_time = replayed if assignment.tier is Tier.SLOW else by_parts
            return super().measure(assignment)

    running.open_machines = machines_with(
        lambda: Served("fake-0", logit_error=lambda candidate: 1e-5 if candidate.parts else 0.0)
    )
    return running


def test_the_serving_loop_is_tuned_on_the_slow_tier(tmp_path: Path) -> None:
    result = run_campaign(serving_campaign(tmp_path / "c", **{"max_batch=2": 0.7, "chunk_tokens=64": 1.3}))
    state = read_state(tmp_path / "c")
    assert "max_batch=2" in result["best"]["label"]
    assert result["best"]["speedup_vs_loaded"]["value"] == pytest.approx(1 / 0.56, rel=0.02), (
        "cold, over the shape table"
    )
    asked = {key for key, info in state.candidates.items() if info.proposer == "serving"}
    served = [
        row.attempt for row in state.attempts if row.attempt.candidate_id in asked and row.attempt.purpose == "search"
    ]
    assert {attempt.tier for attempt in served} == {Tier.SLOW}
    assert {attempt.verdict for attempt in served} >= {Verdict.FASTER, Verdict.SLOWER, Verdict.INCONCLUSIVE}
    steps = [step.candidate_id for step in state.incumbents]
    assert any(state.candidates[step].settings.get("max_batch") == 2 for step in steps)
    keys = [(row.attempt.candidate_id, row.attempt.tier) for row in state.attempts if row.attempt.purpose == "search"]
    assert len(keys) == len(set(keys))


def test_one_client_and_little_time_leave_the_serving_loop_alone(tmp_path: Path) -> None:
    running = serving_campaign(tmp_path / "c")
    running.plan = replace(running.plan, deployment=replace(running.plan.deployment, concurrency=1))
    run_campaign(running)
    assert not [info for info in read_state(tmp_path / "c").candidates.values() if info.proposer == "serving"]


def test_what_fails_alike_is_given_up_once_and_stays_so_after_a_resume(tmp_path: Path) -> None:
    """One part that crashes whatever its parameter: three candidates show it, and none is tried after that."""
    text = (
        part("crash-mlp", "mlp")
        .text()
        .replace("numerics='tolerance'", "params={'tile': [1, 2, 4, 8, 16]}, numerics='tolerance'")
    )
    crash = PartSource(name="crash-mlp", files=(("part.py", text),))
    parts = (part("quick-attention", "self_attn"), crash)
    folder = tmp_path / "c"
    running = make_running(folder, parts=parts)
    running.open_machines = machines_with(fake, lambda port: StopsAt(port, 18, KeyboardInterrupt()))
    with pytest.raises(Interrupted):
        run_campaign(running)
    before = read_state(folder)
    (what,) = before.broken
    assert what.startswith("model.layers.*.mlp: crash-mlp@")
    assert before.broken[what] == "failed: crash: SIGSEGV"
    run_campaign(make_running(folder, parts=parts))
    after = read_state(folder)
    assert after.broken == before.broken
    assert after.decisions["broken"] == 1
    crashed = {row.attempt.candidate_id for row in after.attempts if row.attempt.verdict is Verdict.FAILED}
    assert len(crashed) == 3
    assert what in (folder / "report.html").read_text()


def test_decisions_of_the_search_record_what_later_draws_follow_from(tmp_path: Path) -> None:
    run_campaign(make_running(tmp_path / "c", max_attempts=6))
    decisions = [event.payload for event in read_events(tmp_path / "c" / FOLDER) if event.kind == "decision"]
    states = [d["random_state"] for d in decisions if d["decision"] in ("incumbent", "stop", "promote")]
    assert states
    assert all(re.fullmatch(r"[0-9]+:[0-9]+", state) for state in states)
    assert all(d["last_seq"] >= 0 and d["clock_seconds"] >= 0 for d in decisions)


def test_a_promotion_that_was_interrupted_is_taken_up_again(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    interrupted_campaign(folder, order=3)
    before = read_state(folder)
    (order,) = before.open_orders.values()
    assert order.tier is Tier.SLOW
    run_campaign(make_running(folder))
    resumed = [row.attempt for row in read_state(folder).attempts[len(before.attempts) :]]
    assert (resumed[0].purpose, resumed[1].tier, resumed[1].candidate_id) == (Purpose.AA, Tier.SLOW, order.candidate_id)
