"""Parts in a vLLM that compiles its model: a swap is a recapture, proven by calls counted inside compiled code, and by a canary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.testing import order
from engines.vllm_engine import VllmEngine
from hotpass.records.candidate import AS_LOADED, Candidate, Reload
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import FailureKind, MeasureResult
from tests.engines.vllm.vllm_parts import part

# vLLM compiles at its start and again for each candidate: half a minute here, minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MLP = "model.layers.*.mlp"


def measured(engine: VllmEngine, deployment: Deployment, candidate: Candidate) -> MeasureResult:
    return engine.measure(replace(order(deployment, candidate), deadline_seconds=400.0))


def worst(result: MeasureResult) -> float:
    """Largest difference from the reference's logits on any row."""
    return max(check.max_abs for check in result.checks if check.against == "reference")


def test_a_swap_is_a_recapture_that_runs_the_part_and_leaves_no_trace(
    compiled: VllmEngine, deployment: Deployment
) -> None:
    canary = measured(compiled, deployment, part("canary", MLP, "x", "return -self.reference(x)"))
    assert canary.failure is None, canary.failure
    assert canary.reloads[-1].actual is Reload.RECAPTURE
    assert worst(canary) > 0.1, "compiled in as it was, the forward would have answered right"
    assert len(canary.activation) == 4
    assert len(set(canary.activation.values())) == 1
    assert min(canary.activation.values()) > 0
    assert canary.clean is not None
    assert canary.clean.clean, canary.clean.reasons
    loaded = measured(compiled, deployment, AS_LOADED)
    assert worst(loaded) < 1e-4
    assert not loaded.activation


def test_what_no_operator_of_tokens_can_carry_is_refused(compiled: VllmEngine, deployment: Deployment) -> None:
    body = "return self.reference(x)[:1].contiguous().expand_as(x)[:1]"
    result = measured(compiled, deployment, part("shrinks", "model.layers.3.mlp", "x", body))
    assert result.failure is not None
    assert result.failure.kind in (FailureKind.INSTALL, FailureKind.EXCEPTION)
    assert measured(compiled, deployment, AS_LOADED).failure is None
