"""`hotpass profile` on the fake and on a small module, and what modules are as campaigns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.floors import bounds_ms, suspect_ms
from cluster.resolve import module_load
from cluster.spec import make_spec
from engines import probe
from hotpass.decode import from_plain
from hotpass.errors import InputError
from hotpass.records.candidate import Numerics
from hotpass.records.deployment import Deployment, HardwareRef, Serving
from hotpass.records.profile import Profile

NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def load():
    return Net(), {"rows": {"x": torch.randn(64, 256)}}
"""
PART = """
from hotpass import part


@part(engine="module", claims=["first"], replaces="Linear", numerics="bit-identical")
class Mine:
    def prepare(self, ctx, params):
        self.reference = ctx.reference()

    def forward(self, input):
        return self.reference(input)
"""
RATES = {"read_gb_per_s_at_1_mib": 50.0, "read_gb_per_s": 10.0, "fp32_gflop_per_s": 100.0}
MACHINE = HardwareRef(
    name="cpu:test", device="cpu", num_devices=1, isa=(), last_level_cache_bytes=1 << 25, memory_bytes=1 << 33, details=RATES
)  # fmt: skip
WORK = 2 * 64 * 256 * 512
"""FLOPs of one of the two products."""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "probe_hardware", lambda device="auto": MACHINE)
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def test_the_fake_is_profiled_as_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["profile", "--model", "m", "--traffic", "chat", "--engine", "fake", "--requests", "20"]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "(simulated)" in shown
    assert "simulated::step" in shown
    assert main([*given, "--set", "threads=2", "--json"]) == 0
    found = from_plain(Profile, json.loads(capsys.readouterr().out))
    assert (found.simulated, found.label) == (True, "threads=2")


@pytest.mark.slow
def test_a_module_is_profiled_with_a_part(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = net.parent / "mine.py"
    part.write_text(PART)
    given = ["--engine", "module", "--model", str(net), "--threads", "1", "--json"]
    assert main(["profile", "--candidate", str(part), "--trace", "trace.json", *given]) == 0
    found = from_plain(Profile, json.loads(capsys.readouterr().out))
    assert (found.failure, found.simulated, found.label) == (None, False, "mine")
    (row,) = found.rows
    assert row.row.key == "forward rows n64 q16384"
    slots = {slot.slot: slot for slot in row.slots}
    assert set(slots) == {"model", "first", "second"}
    assert (slots["first"].by_part, slots["second"].by_part) == (True, False)
    assert (slots["first"].flops, slots["model"].flops) == (WORK, 2 * WORK)
    weights = 4 * (256 * 512 + 512)
    assert slots["first"].bytes_moved == weights + 4 * 64 * (256 + 512)
    assert slots["first"].bound_ms == pytest.approx(WORK / 100e9 * 1e3)
    assert slots["first"].distance == pytest.approx(slots["first"].ms / slots["first"].bound_ms)
    assert "aten::addmm" in {operator.name for operator in row.operators}
    assert found.traces == ("trace.json",)
    names = {event.get("name") for event in json.loads(Path("trace.json").read_text())["traceEvents"]}
    assert {"part first", "slot second", "hotpass step"} <= names


def test_a_module_campaign_wants_equal_bits_unless_told_otherwise() -> None:
    spec = make_spec({"engine": "module", "model": "net.py"})
    assert (spec.traffic, spec.numerics) == ("examples", "bit-identical")
    assert make_spec({"engine": "module", "model": "net.py", "numerics": "tolerance"}).numerics == "tolerance"
    for wrong in ({"traffic": "chat"}, {"concurrency": 2}):
        with pytest.raises(InputError, match="its examples are its load"):
            make_spec({"engine": "module", "model": "net.py", **wrong})


def test_floors_of_a_module_are_of_what_it_computes(net: Path) -> None:
    model, traffic, shapes = module_load(str(net), lambda text: None)
    deployment = Deployment(
        model=model, traffic=traffic, hardware=MACHINE, serving=Serving(engine="module"), concurrency=1, shapes=shapes
    )
    key = shapes.rows[0].key
    stream_ms = 4 * (2 * 256 * 512 + 512 + 256) / 50e9 * 1e3
    assert suspect_ms(deployment, Numerics.BIT_IDENTICAL) == {key: pytest.approx(stream_ms)}
    assert bounds_ms(deployment) == {key: pytest.approx(2 * WORK / 100e9 * 1e3)}


def test_slots_of_a_module_and_a_part_to_start_from(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slots", "--engine", "module", "--model", str(net), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["engine"], [slot["name"] for slot in table["slots"]]) == ("module", ["model", "first", "second"])
    assert main(["init-part", "first", "--engine", "module", "--model", str(net), "--out", "start"]) == 0
    text = Path("start/part.py").read_text()
    assert 'claims=["first"]' in text
    assert 'replaces="Linear"' in text
