"""Baselines: transformers' own loop and cache as a side, paired with as loaded by the same windows, in a child of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

from engines.client import Child
from engines.judge.checks import merged
from engines.judge.inputs import seed_of
from engines.judge.pairing import SideBySide
from engines.judge.rounds import BRIEF_ROUNDS, Evidence, Place, Rounds
from engines.program import CandidateFailed
from engines.stable import Stable, machine_fault
from hotpass.records.candidate import Numerics
from hotpass.records.measurement import BaselineMeasurement, Environment, Side, Stopping

BASELINE_NAMES = (
    "transformers-eager-fp32",
    "transformers-sdpa-fp32",
    "transformers-eager-bf16",
    "transformers-sdpa-bf16",
    "transformers-compiled-fp32",
    "transformers-compiled-bf16",
)
"""What `DecoderProgram.install_baseline` takes."""

STOPPING = Stopping(min_rounds=3, max_rounds=3)
"""A baseline is a denominator, not a decision: it need not be as sharp as a candidate, nor be looked at as closely."""


def measure_baseline(
    stable: Stable, environment: Environment, name: str, places: Sequence[Place], seed: int, deadline_seconds: float
) -> BaselineMeasurement:
    """Incumbent = as loaded, candidate = the baseline. The baseline's fault is in the result."""
    evidence, failure = Evidence(), None
    with machine_fault("a fresh child"):
        child = stable.fresh_child()
    deadline = time.monotonic() + deadline_seconds
    with child:
        try:
            _install(stable, child, name, places, deadline)
            rng = random.Random(seed_of(seed, name))
            plan = replace(stable.plan(places, stable.recipe.sources(seed, False), rng), brief_rounds=BRIEF_ROUNDS)
            pair = SideBySide(child, stable.kv, stable.recipe.model.vocab_size)
            Rounds(pair, plan, evidence, rng).until_decided(STOPPING, deadline, look_again=False)
        except CandidateFailed as error:
            failure = error.failure
    return BaselineMeasurement(
        name=name,
        numerics=numerics_of(name, stable.recipe.model.dtype),
        blocks=tuple(evidence.blocks),
        checks=merged(evidence.checks),
        environment=environment,
        failure=failure,
    )


def numerics_of(name: str, dtype: str) -> Numerics:
    """Class of a baseline on a model of that declared dtype: bf16 narrows anything but a bf16 model."""
    return Numerics.LOSSY if name.endswith("bf16") and dtype != "bfloat16" else Numerics.TOLERANCE


def _install(stable: Stable, child: Child, name: str, places: Sequence[Place], deadline: float) -> None:
    for cut in sorted({cut for cut, _ in places}):
        body = {"side": Side.CANDIDATE.value, "name": name, "cut": cut}
        child.call_plain("install_baseline", body, deadline=deadline)
    for side in Side:
        stable.load_contexts(child, side.value, places, deadline)
