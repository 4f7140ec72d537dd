"""Baselines are swept and measured alike; what fails is named, never dropped."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import bench_baselines
from benchmarks.baselines import sweep
from benchmarks.baselines.engines import Measured
from benchmarks.baselines.sweep import POINTS, Generate, Point, Tuning, measure, prompts, tokens_per_second


class Engine:
    """Takes 1 ms a prompt token and `step_ms` a further step, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(sweep.time, "perf_counter", lambda: self.now)

    def set_up(self, tuning: Tuning) -> Generate:
        if "broken" in tuning:
            raise ValueError("not on this machine")

        def generate(tokens: list[list[int]], new_tokens: int) -> None:
            self.now += 1e-3 * len(tokens[0]) + 1e-3 * float(tuning["step_ms"]) * (new_tokens - 1)

        return generate


def test_decoding_speed_leaves_the_prompt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine(monkeypatch).set_up({"step_ms": 10})
    decode = Point("d", "decode", 4, 256, 16)
    assert tokens_per_second(decode, generate, 1) == pytest.approx(4 * 100)
    prefill = Point("p", "prefill", 1, 512, 1)
    assert tokens_per_second(prefill, generate, 1) == pytest.approx(1000)


def test_the_best_tuning_is_repeated_and_a_broken_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    tunings: list[Tuning] = [{"step_ms": 20}, {"broken": True}, {"step_ms": 5}]
    (row,) = measure(tunings, engine.set_up, POINTS[:1], repeats=3, seconds=1e9)
    assert row.tuning == {"step_ms": 5}
    assert row.tokens_per_s == pytest.approx([200.0] * 3)
    assert [item.get("failed") for item in row.swept] == [None, "ValueError: not on this machine", None]
    assert measure([{"broken": True}], engine.set_up, POINTS[:1], repeats=3, seconds=1e9) == []


def test_no_new_tuning_is_begun_after_the_time_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    (row,) = measure([{"step_ms": 20}, {"step_ms": 5}], engine.set_up, POINTS[:1], repeats=1, seconds=1e-3)
    assert row.tuning == {"step_ms": 20}


def test_prompts_are_fresh_and_of_the_asked_length() -> None:
    point = Point("d", "decode", 2, 16, 4)
    first, second = prompts(point, 1)
    assert len(first) == len(second) == 16
    assert first != second
    assert prompts(point, 1) == [first, second]
    assert prompts(point, 2)[0][0] != first[0]


def test_log_probabilities_are_compared_as_such() -> None:
    reference = np.array([[0.0, 1.0, 3.0], [2.0, 0.0, 0.0], [9.0, 9.0, 9.0]], dtype=np.float32)
    shifted = reference[:2] - np.log(np.exp(reference[:2]).sum(-1, keepdims=True))
    shifted[1, 2] += 0.25
    measured = Measured(rows=[], logits=shifted.astype(np.float32), logits_are="log-probabilities")
    assert bench_baselines._largest_difference(measured, reference) == pytest.approx(0.25, abs=1e-5)
    padded = np.pad(reference, ((0, 0), (0, 2)))
    assert bench_baselines._largest_difference(Measured(rows=[], logits=padded), reference) == 0
