"""`hotpass plan` and `hp.plan`, from names to a table, JSON and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hotpass as hp
from cluster.cli import main

CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def test_a_table_for_people(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--hardware", "h200x2", "--concurrency", "8", "--explain", "1"]) == 0
    shown = capsys.readouterr().out
    assert "llama-8b on h200, 1024 tokens in, 1024 out" in shown
    assert "fewest GPUs that hold the limits: 1" in shown
    assert "decode step" in shown
    assert "gqa+dense/gate_up" in shown


def test_json_for_programs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        [
            "plan",
            "--model",
            model,
            "--hardware",
            "h200x2",
            "--traffic",
            "512x64",
            "--top",
            "3",
            "--no-simulate",
            "--json",
        ]
    )
    answer = json.loads(capsys.readouterr().out)
    assert code == 0
    assert len(answer["plans"]) == 3
    assert answer["plans"][0]["tpot_ms"]["low"] < answer["plans"][0]["tpot_ms"]["value"]
    assert answer["asked"]["jobs"] == 0
    assert answer["load"] == {"input_tokens": 512.0, "output_tokens": 64.0, "cached_share": 0.0}


def test_a_picture(model: str, tmp_path: Path) -> None:
    for name, head in (("p.png", b"\x89PNG"), ("p.html", b"<!doctype html>")):
        assert (
            main(["plan", "--model", model, "--hardware", "h200x2", "--no-simulate", "--plot", str(tmp_path / name)])
            == 0
        )
        assert (tmp_path / name).read_bytes().startswith(head)


def test_from_python(model: str) -> None:
    result = hp.plan(model, "h200x2", "chat", simulate=False, price_per_gpu_hour=2.0)
    assert result.plans[0].cost_per_million_output is not None
    assert len(result.dataframe()) == len(result.plans)
    assert len(result.asked.jobs) > 1


def test_shared_prefixes_of_a_trace_are_not_prefilled_twice(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "input_length": 1024, "output_length": 8, "hash_ids": [1, 2 + n // 2]} for n in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = hp.plan(model, "h200x1", str(trace), concurrency=1)
    # Of four prompts of two blocks, the first two and the third's second are new: 2 x 512 + 1 x 512 + 1 x 1023 tokens are known.
    assert result.load.cached_share == pytest.approx((1023 + 512 + 1023) / 4096)
    assert result.plans[0].simulated is not None
    assert result.plans[0].simulated["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hardware", "h20"], "did you mean 'h200'"),
        (["--gpus", "0"], "give at least 1"),
        (["--traffic=-5x10"], "lengths below 1"),
        (["--traffic", "chatt"], "chatt"),
        (["--objective", "speed"], "known: goodput, latency, throughput"),
        (["--kv-dtype", "fp7"], "did you mean 'fp"),
        (["--model", "nobody-has-this"], "no config.json"),
        (["--explain", "999"], "no rank or plan"),
        (["--plot", "x.gif"], ".png nor .html"),
        (["--calibration", "nowhere.json"], "cannot be read"),
        (["--validate", "nowhere.csv"], "cannot be read"),
    ],
)
def test_bad_input_is_one_sentence(
    model: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", "--model", model, "--hardware", "h200x2", "--no-simulate", *arguments])
    told = capsys.readouterr().err
    assert code == 2
    assert says in told
    assert told.count("\n") == 1


def test_a_torn_config_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{")
    assert main(["plan", "--model", str(tmp_path), "--hardware", "h200"]) == 2
    assert "no readable configuration" in capsys.readouterr().err
