"""What a GPU adds to a measurement: weights that were written to, the driver's count of memory, clocks. Without a GPU: scripted processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engines.cuda.conditions import Conditions, GpuState
from engines.cuda.region import DeviceCheck
from engines.judge import device
from engines.judge.device import DRIVER_MARGIN_BYTES, in_words, measured
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import CleanReport, Environment, MeasureResult
from tests.engines.conftest import assignment


class ScriptedStable:
    """Of an engine's processes what concerns a device."""

    def __init__(self, *, written: tuple[str, ...] = (), levels: tuple[int | None, ...] = (None, None)) -> None:
        self.on_device: object | None = object()
        self._written, self._levels = written, list(levels)
        self.pid, self.discarded, self.checks = 7, 0, 0

    def watch_conditions(self) -> Conditions:
        state = GpuState(sm_clock_mhz=1700, memory_clock_mhz=3, temperature_c=50, power_watts=400, reasons=("idle",))
        self.conditions = Conditions(sample=lambda: state)
        return self.conditions

    def written_on_device(self) -> DeviceCheck:
        self.checks += 1
        return DeviceCheck(written=self._written, check_ms=1.0, reload_ms=12.0 if self._written else 0.0)

    def discard_pair(self) -> None:
        self.discarded += 1
        self.pid += 1

    def pair(self) -> Any:
        return SimpleNamespace(child=SimpleNamespace(pid=self.pid))

    def monitored_bytes(self, pid: int) -> int | None:
        return self._levels.pop(0)


@pytest.fixture
def result(deployment: Deployment) -> MeasureResult:
    environment = Environment(hardware_id="h", threads=1, thread_env={}, versions={})
    return MeasureResult(
        assignment=assignment(deployment, Candidate()), engine="e", epoch="w", environment=environment,
        clean=CleanReport(clean=True), phases_ms={"measure": 5.0},
    )  # fmt: skip


def run(stable: ScriptedStable, result: MeasureResult) -> MeasureResult:
    def measure() -> MeasureResult:
        stable.conditions.note()
        return result

    return measured(stable, measure)  # type: ignore[arg-type]


def test_on_a_cpu_it_is_the_measurement_alone(result: MeasureResult) -> None:
    stable = ScriptedStable()
    stable.on_device = None
    assert measured(stable, lambda: result) is result  # type: ignore[arg-type]
    assert stable.checks == 0


def test_clean_weights_change_nothing_and_conditions_are_kept(result: MeasureResult) -> None:
    stable = ScriptedStable()
    got = run(stable, result)
    assert got.weights_unchanged
    assert got.clean == CleanReport(clean=True)
    assert got.gpu is not None
    assert (got.gpu.samples, got.gpu.sm_clock_mhz, got.gpu.limited_by) == (1, (1700, 1700), ())
    assert set(got.phases_ms) == {"measure", "device weights"}
    assert stable.discarded == 0


def test_a_write_marks_the_candidate_and_the_child_is_replaced(result: MeasureResult) -> None:
    stable = ScriptedStable(written=("model.norm.weight", "lm_head.weight"))
    got = run(stable, result)
    assert not got.weights_unchanged
    assert got.clean == CleanReport(
        clean=False,
        reasons=("wrote to 2 shared weights (model.norm.weight, …); loaded again in 12 ms",),
        child_replaced=True,
    )
    assert got.phases_ms["weights loaded again"] == 12.0
    assert stable.discarded == 1


@pytest.mark.parametrize(("grown", "clean"), [(DRIVER_MARGIN_BYTES, True), (DRIVER_MARGIN_BYTES + 1, False)])
def test_memory_past_torchs_allocator_is_seen_by_the_driver(result: MeasureResult, grown: int, clean: bool) -> None:
    stable = ScriptedStable(levels=(1 << 30, (1 << 30) + grown))
    got = run(stable, result)
    assert got.clean is not None
    assert got.clean.clean is clean
    assert stable.discarded == (not clean)
    assert got.clean.reasons == (() if clean else ("device memory grew by 256 MiB by the driver's count",))


def test_a_child_that_was_replaced_took_its_memory_with_it(
    result: MeasureResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    stable = ScriptedStable(written=("a",), levels=(1 << 30,))
    run(stable, result)
    assert stable.discarded == 1
    assert device.in_words(["a"]) == in_words(("a",)) == "wrote to 1 shared weight (a)"
