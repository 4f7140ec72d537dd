"""A whole engine told that its device is a GPU: real children of the toy program, a keeper whose device memory is files, a scripted NVML.

The children find no GPU, so each has a copy and says so; the keeper's side of it, the judge's and the engine's are as they would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines import stable as stable_module
from engines.cuda.conditions import GpuState
from engines.cuda.region import map_weights
from engines.cuda.testing import FileDriver
from engines.decoder_engine import DecoderEngine
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import FailureKind, Tier
from tests.engines.conftest import assignment, candidate, toy_engine
from tests.engines.cuda.on_files import keep_on_files

HONEST = candidate("return reference(tokens, summaries)")
NORM = "model.norm.weight"


class ScriptedMonitor:
    """NVML whose answers are a script's; `meanwhile` happens at each look, which is between rounds."""

    reasons: list[tuple[str, ...]]
    meanwhile: Callable[[], None]

    def sample(self) -> GpuState:
        ScriptedMonitor.meanwhile()
        reasons = ScriptedMonitor.reasons.pop(0) if ScriptedMonitor.reasons else ()
        return GpuState(sm_clock_mhz=1900, memory_clock_mhz=3200, temperature_c=55, power_watts=300, reasons=reasons)

    def process_bytes(self, pid: int) -> int | None:
        return None

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device")


@pytest.fixture(scope="module")
def loaded(deployment: Deployment, folder: Path) -> Iterator[DecoderEngine]:
    with pytest.MonkeyPatch.context() as patch:
        keep_on_files(folder, patch)
        patch.setattr(stable_module, "GpuMonitor", ScriptedMonitor)
        with toy_engine(device="cuda", audited_share=0.0) as engine:
            engine.load(deployment, Tier.FAST)
            yield engine


@pytest.fixture
def engine(loaded: DecoderEngine) -> DecoderEngine:
    ScriptedMonitor.reasons, ScriptedMonitor.meanwhile = [], lambda: None
    return loaded


def write(engine: DecoderEngine, folder: Path) -> None:
    """As a process that maps the weights may."""
    weights = engine._loaded.on_device
    assert weights is not None
    map_weights(weights, FileDriver(folder))[NORM][3] += 1


def test_children_that_cannot_map_the_weights_say_so(engine: DecoderEngine) -> None:
    assert engine.facts["weights"].startswith("a copy of this child's own (")


def test_an_honest_candidate_is_clean_and_its_conditions_are_told(
    engine: DecoderEngine, deployment: Deployment
) -> None:
    result = engine.measure(assignment(deployment, HONEST))
    assert result.failure is None
    assert result.clean is not None
    assert result.clean.clean
    assert result.weights_unchanged
    assert result.gpu is not None
    assert result.gpu.samples == len({block.round_index for block in result.blocks})
    assert (result.gpu.rounds_repeated, result.gpu.limited_by) == (0, ())


def test_a_write_marks_its_candidate_and_the_next_finds_the_weights_as_they_were(
    engine: DecoderEngine, deployment: Deployment, folder: Path
) -> None:
    pid = engine._loaded.pair().child.pid
    ScriptedMonitor.meanwhile = lambda: write(engine, folder)
    result = engine.measure(assignment(deployment, HONEST))
    ScriptedMonitor.meanwhile = lambda: None
    assert not result.weights_unchanged
    assert result.clean is not None
    assert result.clean.child_replaced
    assert result.clean.reasons[-1].startswith(f"wrote to 1 shared weight ({NORM}); loaded again in ")
    assert engine.verify_weights()
    result = engine.measure(assignment(deployment, HONEST))
    assert result.weights_unchanged
    assert result.clean is not None
    assert result.clean.clean
    assert engine._loaded.pair().child.pid != pid


def test_a_write_outside_a_measurement_costs_the_child(engine: DecoderEngine, folder: Path) -> None:
    pid = engine._loaded.pair().child.pid
    write(engine, folder)
    engine.restore()
    assert engine._loaded.pair().child.pid != pid
    assert engine.verify_weights()


def test_a_round_on_a_gpu_that_slows_itself_down_is_measured_again(
    engine: DecoderEngine, deployment: Deployment
) -> None:
    ScriptedMonitor.reasons = [(), ("hardware slowdown",)]
    result = engine.measure(assignment(deployment, HONEST))
    assert result.failure is None
    assert result.gpu is not None
    assert (result.gpu.rounds_repeated, result.gpu.limited_by) == (1, ("hardware slowdown",))
    assert result.gpu.samples == 1 + len({block.round_index for block in result.blocks})
    ScriptedMonitor.reasons = [("hardware slowdown",)] * 3
    result = engine.measure(assignment(deployment, HONEST))
    assert result.failure is not None
    assert result.failure.kind is FailureKind.DISTURBED
    assert "not measurable now: hardware slowdown" in result.failure.message
