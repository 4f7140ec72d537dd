"""A deterministic engine with a virtual clock: for the logic of campaigns, searches and schedulers, never in place of a real one.

Every result says `simulated=True`. Times come from a function of candidate and row; behaviours of bad candidates (crash, wrong
output, hang) are chosen by part name, so that a scheduler's answer to each can be tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol

import numpy as np

from engines.program import CandidateFailed
from hotpass.canonical import content_hash
from hotpass.parts import declaration
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, Reload
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import (
    Agreement,
    Assignment,
    BaselineMeasurement,
    CleanReport,
    Environment,
    Failure,
    FailureKind,
    MeasuredBlock,
    MeasuredReplay,
    MeasureResult,
    OutputCheck,
    Purpose,
    ReloadReport,
    ReplayStats,
    Side,
    Tier,
)
from hotpass.records.profile import OperatorTime, Profile, RowProfile, SlotTime
from hotpass.records.shapes import Phase, ShapeRow
from hotpass.records.slots import Slot, SlotTable
from hotpass.stats import SequentialTest, weighted_round

StepTime = Callable[[Candidate, ShapeRow], float]
"""Candidate and row → time of one step in ms."""


class VirtualClock:
    """Seconds that pass only when something is simulated."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class Behaviour(Protocol):
    """What a candidate does wrong in the fake: called once an attempt, returns a Failure or None."""

    def __call__(self, candidate: Candidate) -> Failure | None: ...


def crash_when_named(candidate: Candidate) -> Failure | None:
    """Parts named `crash…`, `hang…`, `raise…` fail as their names say."""
    names = [use.source.name for use in candidate.parts]
    for prefix, kind, message in (
        ("crash", FailureKind.CRASH, "SIGSEGV"),
        ("hang", FailureKind.TIMEOUT, "no reply by the deadline"),
        ("raise", FailureKind.EXCEPTION, "RuntimeError: planted"),
    ):
        if any(name.startswith(prefix) for name in names):
            return Failure(kind=kind, message=message)
    return None


def step_time_from_costs(base_ms: float, factors: Mapping[str, float]) -> StepTime:
    """Base time scaled by the row's tokens, times one factor for each part name and `setting=value` that is present."""

    def step_ms(candidate: Candidate, row: ShapeRow) -> float:
        time = base_ms * (1 + 0.02 * row.query_tokens + 1e-4 * row.context_mean)
        for use in candidate.parts:
            time *= factors.get(use.source.name, 1.0)
            for name, value in use.params.items():
                time *= factors.get(f"{use.source.name}.{name}={value}", 1.0)
        for name, value in candidate.settings.items():
            time *= factors.get(f"{name}={value}", 1.0)
        return time

    return step_ms


class FakeEngine:
    """Implements `engines.protocol.Engine` and `MeasuresBaselines`. Same seed and same orders give the same answers."""

    def __init__(
        self,
        name: str = "fake-0",
        *,
        step_time: StepTime | None = None,
        noise: float = 0.01,
        seed: int = 0,
        clock: VirtualClock | None = None,
        behaviour: Behaviour = crash_when_named,
        logit_error: Callable[[Candidate], float] = lambda candidate: 1e-5,
        reload_seconds: float = 0.05,
        disturbed: Callable[[Assignment], float] = lambda assignment: 1.0,
    ) -> None:
        self.name = name
        self.step_time = step_time or step_time_from_costs(20.0, {})
        self.noise = noise
        self.clock = clock or VirtualClock()
        self.behaviour = behaviour
        self.logit_error = logit_error
        self.reload_seconds = reload_seconds
        self.disturbed = disturbed
        self._rng = np.random.default_rng(seed)
        self._installed: dict[Side, Candidate] = {}
        self._deployment: Deployment | None = None

    def load(self, deployment: Deployment, tier: Tier) -> Mapping[str, float]:
        """Takes one virtual second."""
        self._deployment = deployment
        self.clock.advance(1.0)
        self.restore()
        return {"weights": 1000.0}

    def slots(self) -> SlotTable:
        """A Llama tree of two layers."""
        return _llama_tree()

    def install(self, side: Side, candidate: Candidate) -> ReloadReport:
        self.clock.advance(self.reload_seconds)
        self._installed[side] = candidate
        return ReloadReport(
            candidate_id=candidate.id,
            side=side,
            declared=Reload.HOT,
            actual=Reload.HOT,
            phases_ms={"swap": self.reload_seconds * 1e3},
        )

    def restore(self) -> None:
        self._installed = {Side.INCUMBENT: AS_LOADED, Side.CANDIDATE: AS_LOADED}

    def close(self) -> None:
        self.restore()

    def generate(self, side: Side, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Tokens that depend on the prompt only: the fake has one model."""
        return [[(sum(prompt) + index) % 256 for index in range(max_tokens)] for prompt in prompts]

    def measure(self, assignment: Assignment) -> MeasureResult:
        started = self.clock.seconds
        reports = (
            self.install(Side.INCUMBENT, assignment.incumbent),
            self.install(Side.CANDIDATE, assignment.candidate),
        )
        failure = self.behaviour(assignment.candidate)
        if failure is not None and failure.kind is FailureKind.TIMEOUT:
            self.clock.advance(assignment.deadline_seconds)
        blocks: list[MeasuredBlock] = []
        replays: list[MeasuredReplay] = []
        if failure is None and assignment.tier is Tier.FAST:
            blocks = self._rounds(assignment)
        elif failure is None:
            replays = self._replays(assignment)
        self.restore()
        return MeasureResult(
            assignment=assignment,
            engine=self.name,
            epoch="fake",
            environment=Environment(hardware_id="fake", threads=1, thread_env={}, versions={"engine": "fake"}),
            pairing=assignment.pairing,
            blocks=tuple(blocks),
            replays=tuple(replays),
            checks=() if failure else tuple(self._check(assignment, row) for row in assignment.rows),
            activation={} if failure else self._activation(assignment),
            reloads=reports,
            clean=CleanReport(clean=failure is None, reasons=() if failure is None else (failure.message,)),
            incumbent_disturbed=self.disturbed(assignment),
            noise_floor=self.noise,
            simulated=True,
            phases_ms={"measure": (self.clock.seconds - started) * 1e3},
            failure=failure,
        )

    def baselines(self) -> Sequence[str]:
        """One: the same model by a loop that is 5 % slower."""
        return ("simulated-loop",)

    def measure_baseline(
        self, name: str, rows: Sequence[ShapeRow], seed: int, deadline_seconds: float
    ) -> BaselineMeasurement:
        order = Assignment(
            incumbent=AS_LOADED,
            candidate=AS_LOADED,
            tier=Tier.FAST,
            purpose=Purpose.SEARCH,
            rows=tuple(rows),
            seed=seed,
            deadline_seconds=deadline_seconds,
        )
        blocks = [
            replace(block, candidate_ms=(block.candidate_ms[0] * 1.05, block.candidate_ms[1] * 1.05))
            for block in self._rounds(order)
        ]
        checks = tuple(self._check(order, row) for row in rows)
        return BaselineMeasurement(name=name, numerics=Numerics.TOLERANCE, blocks=tuple(blocks), checks=checks)

    def score(self, candidate: Candidate, texts: int, tokens_per_text: int, seed: int, noise_abs: float) -> Agreement:
        """Every token agrees; the difference is `logit_error`. A candidate that fails in `measure` fails here."""
        failure = self.behaviour(candidate)
        if failure is not None:
            raise CandidateFailed(failure)
        error, positions = self.logit_error(candidate), texts * tokens_per_text
        return Agreement(
            texts=texts,
            positions=positions,
            agree=positions,
            clear=positions,
            clear_agree=positions,
            noise_abs=noise_abs,
            max_abs=error,
            kl_mean=error**2,
            bit_equal=error == 0.0,
        )

    def reference_noise(self) -> Sequence[OutputCheck]:
        """Reordering changes nothing here, so the policy's floor is the band."""
        assert self._deployment is not None
        return tuple(replace(_exact_check(row), max_abs=1e-6) for row in self._deployment.shapes.rows)

    def verify_weights(self) -> bool:
        return True

    def profile(self, assignment: Assignment, trace_path: str = "") -> Profile:
        """Simulated: each step is one operator and one slot, with a tenth of it between operators. No trace."""
        failure = self.behaviour(assignment.candidate)
        rows = () if failure else tuple(self._row_profile(assignment.candidate, row) for row in assignment.rows)
        return Profile(
            engine=self.name,
            candidate_id=assignment.candidate.id,
            label=assignment.candidate.label,
            rows=rows,
            nsight="simulated: there is nothing for Nsight to see",
            simulated=True,
            failure=failure,
        )

    def _row_profile(self, candidate: Candidate, row: ShapeRow) -> RowProfile:
        ms = self.step_time(candidate, row)
        whole = SlotTime(
            slot="model", stands_for="forward", calls=1.0, ms=ms, self_ms=ms, by_part=bool(candidate.parts),
            bytes_moved=1 << 20, flops=1 << 20, bound_ms=ms / 2,
        )  # fmt: skip
        return RowProfile(
            row=row, steps=1, step_ms=ms, profiled_ms=ms, gaps_ms=ms / 10, num_gaps=1.0, longest_gap_ms=ms / 10,
            operators=(OperatorTime(name="simulated::step", calls=1.0, self_ms=0.9 * ms, share=0.9),), slots=(whole,),
        )  # fmt: skip

    def _rounds(self, assignment: Assignment) -> list[MeasuredBlock]:
        test = SequentialTest(assignment.stopping)
        blocks: list[MeasuredBlock] = []
        while test.decision() is None:
            index = len(test.values)
            round_blocks = [self._block(assignment, row, index) for row in assignment.rows]
            blocks += round_blocks
            test.add(weighted_round(round_blocks))
        return blocks

    def _replays(self, assignment: Assignment) -> list[MeasuredReplay]:
        test = SequentialTest(assignment.stopping)
        replays: list[MeasuredReplay] = []
        while test.decision() is None:
            replays.append(self._replay(assignment, len(replays)))
            test.add(replays[-1].log_ratio)
        return replays

    def _block(self, assignment: Assignment, row: ShapeRow, index: int) -> MeasuredBlock:
        times = {
            side: tuple(self._noisy(self.step_time(candidate, row)) for _ in range(2))
            for side, candidate in (("incumbent", assignment.incumbent), ("candidate", assignment.candidate))
        }
        self.clock.advance(sum(sum(pair) for pair in times.values()) / 1e3)
        return MeasuredBlock(
            row=row,
            round_index=index,
            order="ABBA" if index % 2 == 0 else "BAAB",
            incumbent_ms=(times["incumbent"][0], times["incumbent"][1]),
            candidate_ms=(times["candidate"][0], times["candidate"][1]),
            steps_per_window=1,
            child_clock_ratio=1.0,
            layers=2,
        )

    def _replay(self, assignment: Assignment, index: int) -> MeasuredReplay:
        def stats(candidate: Candidate) -> ReplayStats:
            step = sum(row.steps_share * self.step_time(candidate, row) for row in assignment.rows)
            step = self._noisy(step)
            self.clock.advance(step * 64 / 1e3)
            return ReplayStats(
                num_requests=8,
                output_tokens=64,
                wall_seconds=step * 64 / 1e3,
                ttft_ms=(step,) * 8,
                tpot_ms=(step,) * 8,
                steps=64,
            )

        return MeasuredReplay(
            round_index=index,
            order="ABBA",
            incumbent=(stats(assignment.incumbent), stats(assignment.incumbent)),
            candidate=(stats(assignment.candidate), stats(assignment.candidate)),
        )

    def _check(self, assignment: Assignment, row: ShapeRow) -> OutputCheck:
        error = self.logit_error(assignment.candidate)
        return replace(
            _exact_check(row),
            max_abs=error,
            rms=error / 4,
            worst_row_rms=error / 3,
            bit_equal=error == 0.0,
            kl_mean=error**2,
        )

    def _activation(self, assignment: Assignment) -> dict[str, int]:
        steps = 8 * sum(row.phase is Phase.DECODE for row in assignment.rows) + len(assignment.rows)
        table = self.slots()
        claims = [claim for use in assignment.candidate.parts for claim in declaration(use.source).claims]
        return {slot.name: steps for claim in claims for slot in table.matching(claim)}

    def _noisy(self, time: float) -> float:
        return time * math.exp(self._rng.normal(0.0, self.noise))


@cache
def _llama_tree() -> SlotTable:
    names = ["model", "model.embed_tokens"]
    for layer in range(2):
        root = f"model.layers.{layer}"
        projections = [f"{root}.self_attn.{p}_proj" for p in "qkvo"]
        gated = [f"{root}.mlp.{p}_proj" for p in ("gate", "up", "down")]
        names += [root, f"{root}.input_layernorm", f"{root}.self_attn", *projections]
        names += [f"{root}.post_attention_layernorm", f"{root}.mlp", *gated]
    names += ["model.norm", "lm_head"]
    return SlotTable(
        engine="decoder",
        version="fake",
        slots=tuple(
            Slot(
                name=name,
                stands_for="forward" if name == "model" else _class_of(name),
                signature="(batch, kv)" if name == "model" else "(hidden_states)",
                reference_sha256=content_hash(name),
                lowest_tier=Tier.FAST,
            )
            for name in names
        ),
    )


def _exact_check(row: ShapeRow) -> OutputCheck:
    """Four steps of a row, equal to the reference."""
    positions = 4 * row.num_seqs
    return OutputCheck(
        row=row,
        against="reference",
        max_abs=0.0,
        rms=0.0,
        reference_rms=2.0,
        worst_row_rms=0.0,
        bit_equal=True,
        positions=positions,
        argmax_agree=positions,
        argmax_clear=positions,
        argmax_clear_agree=positions,
        kl_mean=0.0,
    )


def _class_of(name: str) -> str:
    last = name.rsplit(".", 1)[-1]
    if last.isdigit():
        return "LlamaDecoderLayer"
    if "norm" in last:
        return "LlamaRMSNorm"
    if last.endswith("_proj") or last == "lm_head":
        return "Linear"
    return {"self_attn": "LlamaAttention", "mlp": "LlamaMLP", "embed_tokens": "Embedding"}[last]
