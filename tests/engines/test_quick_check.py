"""The quick check tells what is wrong with a part on one layer, in a process of its own (what is right: `test_desk_decoder`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.prepare import prepare_model
from engines.prepare.tiny import make_tiny_model
from engines.quick_check import QuickReport, quick_check
from hotpass.parts import declaration
from hotpass.records.candidate import PartSource
from hotpass.records.deployment import ModelRef

PART = """
import os
import torch
import torch.nn.functional as F
from hotpass import part


@part(engine="decoder", claims=["model.layers.*.mlp"], replaces="LlamaMLP", domain="phase == 'decode'", reload="reweight")
class Mlp:
    def weights(self, w, params):
        return dict(w)

    def prepare(self, ctx, params):
        self.w = ctx.weights

    def forward(self, x):
        gate = F.linear(x, self.w["gate_proj.weight"])
        up = F.linear(x, self.w["up_proj.weight"])
        return F.linear(BODY, self.w["down_proj.weight"])
"""
RIGHT = "F.silu(gate) * up"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    folder = tmp_path_factory.mktemp("quick")
    return prepare_model(str(make_tiny_model(folder / "tiny")), cache_dir=folder / "cache")


def check(model: ModelRef, body: str, tmp_path: Path, deadline_seconds: float = 120.0) -> QuickReport:
    source = PartSource(name="mlp", files=(("part.py", PART.replace("BODY", body)),))
    use = declaration(source).bind(source)
    return quick_check(use, model, cache_dir=tmp_path, deadline_seconds=deadline_seconds)


def test_a_wrong_part_is_told_how_wrong_it_is(model: ModelRef, tmp_path: Path) -> None:
    report = check(model, "gate * up", tmp_path)
    assert report.problem.startswith("wrong on decode")
    assert [row.calls > 0 for row in report.rows] == [True, True, False, False]  # outside of its domain as loaded runs
    assert [row.max_abs <= 1e-4 for row in report.rows] == [False, False, True, True]
    assert report.failure is None


def test_a_part_sees_no_keys_and_what_it_raises_is_told(
    model: ModelRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    report = check(model, "os.environ['OPENAI_API_KEY']", tmp_path)
    assert report.failure is not None
    assert report.problem == "exception: the forward fails: KeyError: 'OPENAI_API_KEY'"
    assert "line" in report.failure.detail
    assert "sk-canary" not in report.failure.detail


def test_a_part_that_cannot_be_built_never_starts_a_process(model: ModelRef, tmp_path: Path) -> None:
    text = PART.replace("BODY", RIGHT).replace('reload="reweight"', 'native={"k": "k.cpp"}')
    source = PartSource(name="mlp", files=(("part.py", text), ("k.cpp", "int f( {")))
    report = quick_check(declaration(source).bind(source), model, cache_dir=tmp_path, deadline_seconds=60)
    assert report.failure is not None
    assert (report.failure.kind, report.rows) == ("build", ())
