"""The GPU check as a script: what it says without a GPU, and its whole path on a CPU with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import memory, parts
from benchmarks.gpu.outcome import Place, Skipped, Wrong, run_check
from engines.cuda.region import Region
from search.catalogue import find_part

ROOT = Path(__file__).parents[2]
ON_CPU = ["--device", "cpu", "--shapes", "tiny", "--steps", "2", "--blocks", "1", "--dtypes", "float32"]


def line_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == {"bench": "gpu_check", "gpu": None}
    assert "no GPU" in printed.err


def test_what_concerns_a_gpu_alone_is_skipped_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([*ON_CPU, "--only", "clocks", "graphs", "engine"]) == 0
    line = line_of(capsys)
    assert (line["passed"], line["failed"]) == (0, 0)
    assert line["skipped"] == len(line["checks"]) == 10
    assert all(check["reason"].endswith("without a GPU") for check in line["checks"])


def test_memory_shared_with_another_process_is_checked_over_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([*ON_CPU, "--only", "memory"]) == 0
    line = line_of(capsys)
    statuses = {check["name"]: check["status"] for check in line["checks"]}
    assert statuses == {
        "memory: weights by IPC": "passed",
        "memory: planted writes": "passed",
        "memory: checksum": "passed",
        "memory: leaked tensors": "skipped",
        "memory: leak past torch": "skipped",
    }


def test_a_keeper_that_sees_no_write_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Region, "_sum", lambda self, spec: 0)
    outcome = run_check("planted", memory.planted_writes, Place(device="cpu", folder=tmp_path))
    assert outcome.status == "failed"
    assert outcome.reason.startswith("one bit: found ('(between the weights)',), not ['a', 'tied']")


def test_parts_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [find_part(name) for name in ("lean-model", "attention-bmm")]
    monkeypatch.setattr(parts, "load_catalogue", lambda device: chosen)
    assert gpu_check.main([*ON_CPU, "--only", "parts"]) == 0
    line = line_of(capsys)
    rows = {(row["candidate"], row["row"]): row for row in line["parts"]["tiny float32"]}
    assert len(rows) == 9
    assert rows["lean-model(storage=loaded)", "decode n8 q8 c256"]["calls"] == 1
    assert rows["attention-bmm", "prefill n1 q8 c0"]["calls"] == 0
    assert rows["as loaded", "decode n1 q1 c256"]["error"] == 0
    assert all(row["speedup"] > 0 and row["clocks"] is None for row in rows.values())


def test_a_wrong_part_is_an_exit_of_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_part("norm-fused")
    text = source.text().replace("self.weight, self.eps)", "self.weight, 0.5)")
    assert text != source.text()
    broken = type(source)(name="broken-norm", files=(("part.py", text),))
    monkeypatch.setattr(parts, "load_catalogue", lambda device: [broken])
    assert gpu_check.main([*ON_CPU, "--only", "parts"]) == 1
    line = line_of(capsys)
    assert line["failed"] == 1
    wrong = {row["candidate"] for row in line["parts"]["tiny float32"] if row["problem"]}
    assert wrong == {"broken-norm"}
    assert "broken-norm on decode n1 q1 c256: wrong: error" in line["checks"][0]["reason"]


def test_one_broken_check_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def raises(error: Exception) -> Any:
        def check(place: Place) -> dict[str, object]:
            raise error

        return check

    place = Place(device="cpu", folder=tmp_path)
    outcomes = [
        run_check("x", raises(error), place)
        for error in (Skipped("why"), Wrong("how"), ZeroDivisionError("zero"), ModuleNotFoundError(name="pynvml"))
    ]
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [
        ("skipped", "why"),
        ("failed", "how"),
        ("failed", "ZeroDivisionError: zero"),
        ("skipped", "needs pynvml"),
    ]


BARE = """
import sys

absent = "gguf matplotlib mlflow optuna pandas psutil pyarrow pydantic ray rich litellm mcp scipy sklearn"
sys.modules.update(dict.fromkeys(absent.split()))  # as if not installed, for import and find_spec alike
import engines.decoder_engine, engines.build, engines.build_derived, engines.child, engines.keeper, engines.zygote
from benchmarks import gpu_check
sys.exit(gpu_check.main(sys.argv[1:]))
"""


def test_a_bare_machine_has_what_it_imports() -> None:
    """torch, triton, transformers and what they bring; none of the package's other libraries."""
    command = [sys.executable, "-c", BARE, *ON_CPU, "--only", "clocks", "engine"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert not [check for check in line["checks"] if check["reason"].startswith("needs")]
