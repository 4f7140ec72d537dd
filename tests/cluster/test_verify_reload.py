"""`hotpass verify --reload` on a real engine and a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli import main
from engines.prepare.tiny import make_tiny_model

PART = """
import torch.nn.functional as F

from hotpass import part


@part(engine="decoder", claims=["model"])
class Planted:
    def prepare(self, ctx, params):
        self.reference, self.silu = ctx.reference(), F.silu
        F.silu = lambda x, inplace=False: x

    def forward(self, batch, kv):
        return self.reference(batch, kv)

    def close(self):
        F.silu = {left}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("verify") / "model", layers=2))


@pytest.mark.slow
def test_what_does_not_come_back_is_exit_1_and_said(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that computes with another function, and does not put the true one back when it is taken off."""
    monkeypatch.setenv("HOTPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    part = tmp_path / "planted.py"
    part.write_text(PART.format(left="F.silu"))
    given = ["--model", model, "--traffic", "chat", "--requests", "8", "--threads", "1", "--quiet"]
    assert main(["verify", "--reload", str(part), *given]) == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["holds"] is False
    assert "what was there before does not come back" in line["reason"]
    assert (line["verify"], line["warm_cold_max_abs"], line["texts_equal"]) == ("reload", 0.0, True)
    assert line["back_max_abs"] > 0
    assert line["windows"] > 0


def test_an_engine_without_processes_says_so(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--model", model, "--traffic", "chat", "--requests", "8", "--engine", "fake", "--quiet"]
    (tmp_path / "planted.py").write_text(PART.format(left="self.silu"))
    assert main(["verify", "--reload", "planted.py", *given]) == 2
    assert "has no processes to prove a reload in" in capsys.readouterr().err
