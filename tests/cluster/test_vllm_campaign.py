"""A live vLLM as commands: a campaign on a tiny model with the catalogue's parts for its tree, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.journal import read_state
from engines import probe
from engines.prepare.tiny import make_tiny_model
from engines.vllm.environment import find_python
from hotpass.errors import InputError
from hotpass.records.deployment import HardwareRef
from hotpass.records.measurement import Verdict

MACHINE = HardwareRef(
    name="cpu:test", device="cpu", num_devices=1, isa=("avx2",), last_level_cache_bytes=1 << 25, memory_bytes=1 << 33
)


def needs_vllm() -> None:
    try:
        find_python()
    except InputError as error:
        pytest.skip(f"{error} (`make vllm` makes it)")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_catalogues_parts_are_tried_on_vllms_own_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_vllm()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "probe_hardware", lambda device="auto": MACHINE)
    make_tiny_model(tmp_path / "model", layers=2, hidden=128, heads=4, kv_heads=2, max_context=256)
    given = ["--engine", "vllm", "--model", "model", "--traffic", "chat", "--requests", "200", "--threads", "1"]
    short = ["--budget", "10m", "--max-attempts", "2", "--no-baselines", "--no-ray", "--quiet", "--out", "c"]
    assert main(["compile", *given, *short]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["attempts"] == 2
    state = read_state(tmp_path / "c")
    tried = [row.attempt for row in state.search_attempts()]
    assert {info.label.partition("(")[0] for info in state.candidates.values()} >= {"vllm-norm", "vllm-mlp"}
    wrong = {Verdict.INCORRECT, Verdict.FAILED}
    assert not {attempt.verdict for attempt in tried} & wrong, [attempt.reason for attempt in tried]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_profile_tells_vllms_slots_by_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_vllm()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "probe_hardware", lambda device="auto": MACHINE)
    make_tiny_model(tmp_path / "model", layers=2, hidden=128, heads=4, kv_heads=2, max_context=256)
    given = ["--engine", "vllm", "--model", "model", "--traffic", "chat", "--requests", "200", "--threads", "1"]
    assert main(["profile", *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"]
    slots = {item["slot"]: item for item in found["rows"][0]["slots"]}
    assert {"model", "model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.act_fn"} <= slots.keys()
    assert all(Path(path).is_file() for path in found["traces"])
