"""One session of a campaign: engines loaded, the deployment as loaded measured against itself and against the baselines, and the
one way in which a candidate is measured, judged and recorded. The search, the finalists and `hotpass try` all go through it.

    order ─► assignment event ─► engine ─► Measured ─► judge ─► lease, measurement, attempt events ─► durable ─► Attempt

What is not here: which candidate to measure (`cluster.loop`), and what may be claimed (`cluster.finish`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Protocol

from actors.builder import Built
from actors.engine import Measured
from cluster.building import Foreseen
from cluster.journal import Journal
from cluster.plan import Plan
from cluster.ports import EnginePort, View
from cluster.state import AttemptRow, chain
from hotpass.canonical import content_hash
from hotpass.decode import json_safe
from hotpass.errors import InputError, MachineError
from hotpass.pairing import choose_pairing
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics
from hotpass.records.measurement import (
    Assignment,
    Attempt,
    BaselineMeasurement,
    Estimate,
    Failure,
    MeasureResult,
    Pairing,
    Purpose,
    Stopping,
    Tier,
    Verdict,
)
from hotpass.records.slots import SlotTable
from hotpass.stats import tokens_per_second
from search.objectives import ratios_of
from verification.claims import baseline_of
from verification.numerics import Band, calibrate, reference_checks, summary
from verification.policy import Policy
from verification.verdict import judge

BASELINE_SHARE = 0.1
"""Of the budget: no further baseline is begun beyond it."""

OWN_MULTIPLE = 2.5
"""Deadline of an attempt in A/A rows (three rounds of as loaded beside itself), where that is more than the pace's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An assignment under way."""

    number: int
    engine: EnginePort
    assignment: Assignment
    future: Future[Measured]


class Hush(Protocol):
    """Something that works beside measurements, and must stand still during them: MLflow's mirror."""

    def pause(self) -> None: ...

    def go_on(self) -> None: ...


class Session:
    """Engines, judge and journal of a campaign, between start and end of one process."""

    def __init__(
        self,
        plan: Plan,
        journal: Journal,
        engines: Sequence[EnginePort],
        view: View,
        store: Callable[[Candidate], object],
        bounds_ms: Mapping[str, float] | None = None,
        suspect_ms: Mapping[str, float] | None = None,
        hush: Hush | None = None,
    ) -> None:
        """`hush` stands still while an engine measures; `bounds_ms` are shown, times below `suspect_ms` are rejected."""
        self.plan = plan
        self.journal = journal
        self.state = journal.state
        self.engines = list(engines)
        self.view = view
        self.store = store
        self.bounds_ms = dict(bounds_ms or {})
        self.suspect_ms = dict(suspect_ms or {})
        self.hush = hush
        self.foreseen: Foreseen | None = None
        """What may be built ahead of being proposed."""
        self._measuring = 0
        self.policy = Policy(numerics=Numerics(plan.spec.numerics))
        self.candidates: dict[str, Candidate] = {AS_LOADED.id: AS_LOADED}
        """Every candidate that this session handles, by id."""
        self.band: Band | None = None
        self.slot_table: SlotTable | None = None
        self.results: dict[int, MeasureResult] = {}
        """Results of cold assignments, which the gates look at whole."""

    def start(self, foreseen: Foreseen | None = None) -> None:
        """Load every engine, then measure as loaded against itself (A/A), which also calibrates what a correct output is.

        `foreseen`: what a builder makes meanwhile; nothing is measured before it stands still."""
        self.foreseen = foreseen
        meanwhile: AbstractContextManager[list[Built]] = (
            foreseen.meanwhile() if foreseen else contextlib.nullcontext([])
        )
        with meanwhile as built:
            phases = self._load_all()
            self.view.activity("builder", "finishing what will be tried first" if foreseen else "")
        self.view.activity("builder", "")
        self.slot_table = self.engines[0].slots()
        self.journal.decide(
            "start",
            engines=[dict(engine.facts()) for engine in self.engines],
            slot_table=self.slot_table.version,
            startup_ms=phases,
            builds=[cost_of(item) for item in built],
            floors_ms=self.bounds_ms,
            session=self.state.decisions["start"] + 1,
        )
        self._calibrate()

    def _load_all(self) -> dict[str, dict[str, float]]:
        """Engine → start-up time by phase."""
        if len(self.engines) == 1:  # here, where Ctrl-C reaches it
            loaded = [self._load(self.engines[0])]
        else:
            with ThreadPoolExecutor(len(self.engines)) as pool:
                loaded = list(pool.map(self._load, self.engines))
        return {engine.name: phases for engine, phases in zip(self.engines, loaded, strict=True)}

    def _load(self, engine: EnginePort) -> dict[str, float]:
        """Start-up time by phase. Cuts that were made deeper in an earlier session are so again."""
        self.view.activity(engine.name, "loading the model")
        phases = dict(engine.load(self.plan.deployment, Tier.FAST))
        for _ in range(self.state.widened):
            engine.widen()
        self.view.activity(engine.name, "")
        return phases

    def _calibrate(self) -> None:
        """A/A once per session, since engines are new and so is their noise; with it, what a correct output may differ by."""
        engine = self.engines[0]
        noise = list(engine.noise())
        order = self.order(engine, AS_LOADED, AS_LOADED, Tier.FAST, Purpose.AA)
        measured = order.future.result()
        loaded = list(reference_checks(measured.result))
        if not noise:
            # The engine cannot reorder its reference: the policy's relative floor stands in for that noise.
            noise = [replace(check, max_abs=0.0) for check in loaded]
        if not noise:
            self.ended()
            raise MachineError(f"the deployment as loaded cannot be measured: {_why(measured.result)}")
        self.band = calibrate(noise, loaded, self.plan.deployment.model.dtype, self.policy)
        self._refuse_another_environment(measured.result)
        self.settle(order, measured)

    def _refuse_another_environment(self, result: MeasureResult) -> None:
        """Attempts of a resumed campaign are chained to earlier ones, so both must come from equal environments."""
        own = [row.assignment for row in self.state.attempts if row.attempt.purpose is Purpose.AA]
        earlier = [self.state.results[number].get("environment") for number in own if number in self.state.results]
        now = json_safe(result.environment)
        if not earlier or earlier[-1] == now:
            return
        self.ended()
        known = dict(earlier[-1] or {})
        differing = [
            f"{name} {known.get(name)} then, {value} now" for name, value in now.items() if known.get(name) != value
        ]
        raise InputError(
            "campaign",
            self.plan.campaign,
            f"was measured in another environment ({'; '.join(differing)[:300]})",
            "resume it where it began, or start a new one with --continue",
        )

    def widen(self) -> tuple[int, ...]:
        """Every engine with deeper cuts on the fast tier, then A/A anew. Depths of the cuts; nothing when there are no deeper ones."""
        depths: tuple[int, ...] = ()
        for engine in self.engines:
            self.view.activity(engine.name, "loading deeper cuts")
            depths = tuple(engine.widen())
            self.view.activity(engine.name, "")
        if depths:
            self._calibrate()
        return depths

    def measure_own(self) -> AttemptRow:
        """As loaded against itself, again."""
        order = self.order(self.engines[0], AS_LOADED, AS_LOADED, Tier.FAST, Purpose.AA)
        return self.settle(order, order.future.result())

    def measure_baselines(self) -> None:
        """Transformers' own loops, in this session, paired with as loaded; eager ones first, within a share of the budget.

        Those already measured are kept. Compiled ones take minutes to compile, so they are left to `make bench-baselines`.
        """
        engine, known = self.engines[0], {row.name for row in self.state.baselines if not row.failure}
        names = [name for name in engine.baselines() if "compiled" not in name and name not in known]
        clock, skipped = self.journal.clock, []
        ends = clock.seconds() + BASELINE_SHARE * self.plan.spec.budget_seconds
        for name in sorted(names, key=lambda name: ("eager" not in name, names.index(name))):
            if clock.seconds() >= ends:
                skipped.append(name)
                continue
            self.view.activity(engine.name, f"baseline {name}")
            rows = self.plan.deployment.shapes.rows
            seed = self.seed_of(f"baseline {name}", 0)
            found = engine.baseline(name, rows, seed, self.plan.pace.cold_deadline_seconds)
            self.journal.write("measurement", self._baseline_payload(found))
            self.journal.settle()
            self.view.activity(engine.name, "")
        if skipped:
            self.view.note(f"no time in this budget for the baselines {', '.join(skipped)}")

    def _baseline_payload(self, found: BaselineMeasurement) -> dict[str, object]:
        known = baseline_of(found)
        rate = tokens_per_second(
            found.blocks, self.plan.deployment.shapes.output_tokens_per_step, candidate=True
        ) if known else None  # fmt: skip
        return {
            "baseline": found.name,
            "numerics": found.numerics,
            "speedup": self._kind(known.speedup_vs_loaded) if known else None,
            "tokens_per_second": rate,
            "numerics_measured": summary([check for check in found.checks if check.against == "reference"]),
            "failure": found.failure.message if found.failure else ("" if known else "no whole round was measured"),
            "result": found,
        }

    def keep(self, candidate: Candidate) -> None:
        """Write a candidate's sources to the campaign's store, before anything in the log names it."""
        if candidate.id not in self.candidates:
            self.candidates[candidate.id] = candidate
            self.store(candidate)

    def seed_of(self, what: str, number: int) -> int:
        """A seed of its own for each use: cold inputs are never those of the search."""
        return int(content_hash([self.plan.spec.seed, what, number])[:12], 16)

    def order(
        self,
        engine: EnginePort,
        incumbent: Candidate,
        candidate: Candidate,
        tier: Tier,
        purpose: Purpose,
        before: Sequence[str] = (),
        built: Built | None = None,
    ) -> Order:
        """Record an assignment, then hand it to an engine. `before`: candidates that came first and had to wait. `built`: what building
        the candidate took just now."""
        pace, deployment, number = self.plan.pace, self.plan.deployment, self.state.num_assignments
        stopping, deadline = self._effort(tier, purpose)
        assignment = Assignment(
            incumbent=incumbent,
            candidate=candidate,
            tier=tier,
            purpose=purpose,
            rows=deployment.shapes.rows,
            seed=self.seed_of(purpose, number),
            deadline_seconds=deadline,
            pairing=choose_pairing(incumbent, candidate, tier, purpose),
            stopping=stopping,
            replay_requests=max(pace.replay_requests, 2 * deployment.concurrency) if tier is Tier.SLOW else 0,
        )
        self.journal.write(
            "assignment",
            {
                "assignment": number,
                "candidate_id": candidate.id,
                "incumbent_id": incumbent.id,
                "tier": tier,
                "purpose": purpose,
                "pairing": assignment.pairing,
                "seed": assignment.seed,
                "deadline_seconds": deadline,
                "engine": engine.name,
                **({"before": before} if before else {}),
                **({"build": cost_of(built)} if built else {}),
            },
        )
        self.view.activity(engine.name, f"{purpose} · {tier} · {candidate.label}")
        self._begin()
        return Order(number=number, engine=engine, assignment=assignment, future=engine.submit(assignment))

    def _effort(self, tier: Tier, purpose: Purpose) -> tuple[Stopping, float]:
        pace = self.plan.pace
        if purpose is Purpose.AA:
            return pace.own, pace.cold_deadline_seconds
        if purpose is Purpose.COLD:
            return pace.cold, max(pace.cold_deadline_seconds, 2 * self._patience())
        if tier is Tier.SLOW:
            return pace.slow, max(pace.slow_deadline_seconds, self._patience())
        return pace.fast, max(pace.fast_deadline_seconds, self._patience())

    def _patience(self) -> float:
        """Seconds that an attempt may take on this machine as it is now: on a busy one, as loaded alone may need a minute.

        A deadline is for what hangs. What is merely measured slowly must not be taken for it.
        """
        return OWN_MULTIPLE * self.state.tally.own_seconds

    def _begin(self) -> None:
        self._measuring += 1
        if self.hush is not None:
            self.hush.pause()

    def ended(self) -> None:
        """An order has come back, with an answer or without."""
        self._measuring -= 1
        if self.hush is not None and not self._measuring:
            self.hush.go_on()

    def settle(self, order: Order, measured: Measured) -> AttemptRow:
        """Judge, record durably, return the attempt as recorded."""
        assert self.band is not None
        self.ended()
        result = measured.result
        self.journal.clock.observe(result)
        self.view.activity(order.engine.name, "")
        deployment = self.plan.deployment
        attempt = judge(
            result,
            policy=self.policy,
            band=self.band,
            shapes=deployment.shapes,
            num_layers=deployment.model.num_layers,
            floors_ms=self.suspect_ms,
        )
        if attempt.speedup:
            kind = "simulated" if result.simulated else attempt.speedup.kind
            attempt = replace(attempt, speedup=replace(attempt.speedup, kind=kind), ratios=ratios_of(result))
        lease = {"domain": measured.domain, "holder": order.engine.name, "wait_seconds": measured.wait_seconds}
        self.journal.write("lease", {**lease, "state": "released", "assignment": order.number})
        self.journal.write("measurement", self._measurement_payload(order, result))
        if result.assignment.purpose is Purpose.COLD:
            self.results[order.number] = result
        about = {"engine": result.engine, "epoch": result.epoch, "environment": result.environment.fingerprint}
        return self.record_attempt(order.number, attempt, {**about, "phases_ms": result.phases_ms})

    def record_attempt(self, number: int, attempt: Attempt, about: Mapping[str, object] | None = None) -> AttemptRow:
        """Durable when it returns: acknowledged, and counted exactly once whatever happens next.

        `about`: which engine, epoch, environment and phases it came from; nothing for one that no engine answered."""
        incumbent = self.state.speedup_of(attempt.incumbent_id)
        vs_loaded = chain(attempt.speedup, incumbent) if attempt.speedup and incumbent else None
        payload = {"assignment": number, "attempt": attempt, "speedup_vs_loaded": vs_loaded, **(about or {})}
        self.journal.write("attempt", payload)
        self.journal.settle()
        return self.state.attempts[-1]

    def fail_build(
        self, candidate: Candidate, incumbent: Candidate, failure: Failure, built: Built | None = None
    ) -> AttemptRow:
        """A candidate that no builder could make: an attempt like any other, that no engine saw."""
        number = self.state.num_assignments
        self.journal.write(
            "assignment",
            {
                "assignment": number,
                "candidate_id": candidate.id,
                "incumbent_id": incumbent.id,
                "tier": Tier.FAST,
                "purpose": Purpose.SEARCH,
                "pairing": Pairing.SIDE_BY_SIDE,
                "seed": 0,
                "deadline_seconds": self.plan.pace.fast_deadline_seconds,
                "engine": "builder",
                **({"build": cost_of(built)} if built else {}),
            },
        )
        attempt = Attempt(
            candidate_id=candidate.id,
            incumbent_id=incumbent.id,
            tier=Tier.FAST,
            purpose=Purpose.SEARCH,
            verdict=Verdict.FAILED,
            reason=f"{failure.kind}: {failure.message}",
            speedup=None,
            tokens_per_second=None,
        )
        return self.record_attempt(number, attempt)

    def close(self) -> None:
        """Every engine, whatever one of them says to it."""
        for engine in self.engines:
            with contextlib.suppress(Exception):
                engine.close()

    def _measurement_payload(self, order: Order, result: MeasureResult) -> dict[str, object]:
        assignment = result.assignment
        return {
            "assignment": order.number,
            "candidate_id": assignment.candidate.id,
            "incumbent_id": assignment.incumbent.id,
            "tier": assignment.tier,
            "purpose": assignment.purpose,
            "result": {item.name: getattr(result, item.name) for item in fields(result) if item.name != "assignment"},
        }

    def _kind(self, estimate: Estimate) -> Estimate:
        return replace(estimate, kind="simulated") if self.plan.spec.engine == "fake" else estimate


def cost_of(built: Built) -> dict[str, float]:
    """A build as the log has it."""
    return {"seconds": round(built.seconds, 3), "core_seconds": round(built.core_seconds, 3)}


def _why(result: MeasureResult) -> str:
    return result.failure.message if result.failure else "no output was compared with the reference"
