"""The GPU check as a script: what it says without a GPU, and its whole path on a CPU with a tiny model."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_check


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == {"bench": "gpu_check", "gpu": None}
    assert "no GPU" in printed.err


def test_its_path_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [source for source in gpu_check.load_catalogue("cpu") if source.name in ("lean-model", "attention-bmm")]
    monkeypatch.setattr(gpu_check, "load_catalogue", lambda device: chosen)
    command = ["--device", "cpu", "--shapes", "tiny", "--steps", "2", "--windows", "1", "--dtype", "float32"]
    assert gpu_check.main(command) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["candidate"], row["row"]): row for row in line["results"]["tiny"]}
    assert line["wrong"] == 0
    assert len(rows) == 9
    assert rows["lean-model(storage=loaded)", "decode n8 q8 c256"]["calls"] == 1
    assert rows["attention-bmm", "prefill n1 q8 c0"]["calls"] == 0
    assert rows["as loaded", "decode n1 q1 c256"]["error"] == 0


def test_a_wrong_part_is_an_exit_of_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(source for source in gpu_check.load_catalogue("cpu") if source.name == "norm-fused")
    text = source.text().replace("self.weight, self.eps)", "self.weight, 0.5)")
    assert text != source.text()
    broken = type(source)(name="broken-norm", files=(("part.py", text),))
    monkeypatch.setattr(gpu_check, "load_catalogue", lambda device: [broken])
    command = ["--device", "cpu", "--shapes", "tiny", "--steps", "2", "--windows", "1", "--dtype", "float32"]
    assert gpu_check.main(command) == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["wrong"] == 3
    assert all("wrong: error" in row["problem"] for row in line["results"]["tiny"] if row["candidate"] == "broken-norm")
