"""Baselines are swept and measured alike; what fails is named, never dropped."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bench_baselines
from benchmarks.baselines import processes, sweep
from benchmarks.baselines.beside import over
from benchmarks.baselines.processes import Measured
from benchmarks.baselines.sweep import (
    POINTS,
    ROW,
    TURN,
    Generate,
    Point,
    Row,
    Tuning,
    measure,
    prompts,
    tokens_per_second,
)
from benchmarks.bench_decode import goals


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
    assert list(measure([{"broken": True}], engine.set_up, POINTS[:1], repeats=3, seconds=1e9)) == []


def test_no_new_tuning_is_begun_after_the_time_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    (row,) = measure([{"step_ms": 20}, {"step_ms": 5}], engine.set_up, POINTS[:1], repeats=1, seconds=1e-3)
    assert row.tuning == {"step_ms": 20}


def test_each_repeat_is_followed_by_a_turn_of_hotpass(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, turns = Engine(monkeypatch), []
    rows = measure([{"step_ms": 5}], engine.set_up, POINTS, repeats=2, seconds=1e9, turn=turns.append)
    assert [row.point for row in rows] == [point.name for point in POINTS]
    assert turns == [point.name for point in POINTS for _ in range(2)]


def test_a_runner_that_ends_early_leaves_its_rows_and_the_reason(tmp_path: Path) -> None:
    """Turns in between; what it said on stdout besides is no row."""
    row = Row("decode-1", {"threads": 2}, [100.0, 110.0])
    script = tmp_path / "runner.py"
    script.write_text(
        "import dataclasses, json, sys\n"
        f"print({TURN!r} + 'decode-1', flush=True)\n"
        "assert sys.stdin.readline() == '\\n'\n"
        "print('a banner', flush=True)\n"
        f"print({ROW!r} + {json.dumps(dataclasses.asdict(row))!r}, flush=True)\n"
        "raise SystemError('out of luck')\n"
    )
    turns: list[str] = []
    said, problem = processes.converse([sys.executable, str(script)], dict(os.environ), turns.append)
    assert turns == ["decode-1"]
    assert [line.startswith(ROW) for line in said] == [False, True]
    assert Row(**json.loads(said[1].removeprefix(ROW))) == row
    assert problem.endswith("ended with 1: SystemError: out of luck")


def test_ratios_are_of_repeats_that_both_have() -> None:
    assert over([300.0, 200.0, 260.0], [100.0, 100.0]) == {"median": 2.5, "low": 2.0, "high": 3.0, "pairs": 2}


def _row(who: str, speed: float, max_abs: float | None, **more: Any) -> dict[str, Any]:
    point = {"tokens_per_s": speed, **more.pop("point", {})}
    return {"who": who, "paired": False, "max_abs": max_abs, "points": {"decode-1": point}, **more}


def test_goals_are_against_the_best_baseline_that_is_no_more_accurate() -> None:
    """An exact part has every baseline against it; a lossy one only those that lose as much."""
    exact = _row("hotpass cpp-model gguf", 170, 6e-5, weights_as="gguf", point={"bound_fraction": 0.7})
    lossy = _row("hotpass cpp-model gguf-a8", 230, 0.9, weights_as="gguf-a8", point={"bound_fraction": 0.9})
    accurate = _row("openvino f32", 100, 3e-5)
    rough = _row("llama.cpp gguf", 80, 1.1, point={"hotpass_over_it": {"gguf-a8": {"median": 2.7}}})
    other_model = _row("llama.cpp q4_0", 500, 3.0, is_baseline=False)
    goal = goals("smollm2-135m", [exact, lossy, accurate, rough, other_model])[0]
    assert (goal["ours"], goal["over"], goal["ratio"], goal["paired"]) == (lossy["who"], rough["who"], 2.7, True)
    assert goal["met"] is True
    without_lossy = goals("smollm2-135m", [exact, accurate, rough, other_model])[0]
    assert (without_lossy["over"], without_lossy["ratio"]) == (accurate["who"], 1.7)
    assert without_lossy["met"] is False
    assert goals("smollm2-135m", [exact, other_model])[0]["met"] is None


def test_the_bound_is_part_of_the_goal_of_the_bf16_model() -> None:
    rows = [_row("hotpass cpp-model bf16", 80, 1e-4, point={"bound_fraction": 0.79}), _row("vllm bf16", 40, 0.3)]
    goal = goals("smollm2-135m-bf16", rows)[0]
    assert (goal["ratio"], goal["met"]) == (2.0, False)
    rows[0]["points"]["decode-1"]["bound_fraction"] = 0.81
    assert goals("smollm2-135m-bf16", rows)[0]["met"] is True


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
