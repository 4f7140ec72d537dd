"""What is asked of aiconfigurator, of a stand-in for it: every database is looked up once, and what was answered in time stays."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from benchmarks import aiconfigurator_answers as answers


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Looks its database up for each row, refuses tensor parallelism of 3, and takes 2 ms a token."""
    seen: dict[str, list[Any]] = {"lookups": [], "rows": []}
    databases, api = ModuleType(answers.DATABASES), ModuleType(answers.API)

    def latest(system: str, backend: str) -> str:
        seen["lookups"].append((system, backend))
        return "1.0"

    def estimate(model: str, system: str, *, backend_name: str, **given: Any) -> SimpleNamespace:
        databases.get_latest_database_version(system=system, backend=backend_name)  # type: ignore[attr-defined]
        seen["rows"].append((model, given))
        if given.get("tp_size") == 3:
            raise KeyError("no such kernel")
        return SimpleNamespace(tpot=2.0, ttft=20.0)

    databases.get_supported_databases = dict  # type: ignore[attr-defined]
    databases.get_latest_database_version = latest  # type: ignore[attr-defined]
    api.cli_estimate = estimate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, answers.DATABASES, databases)
    monkeypatch.setitem(sys.modules, answers.API, api)
    return seen


def rows_of(**columns: list[Any]) -> pd.DataFrame:
    made = pd.DataFrame(columns)
    plain = {"model_path": "a", "system": "h200_sxm", "backend": "vllm", "mode": "agg", "isl": 1024, "osl": 128}
    return made.assign(id=[f"row{n}" for n in range(len(made))], **{k: v for k, v in plain.items() if k not in made})


def test_a_database_is_looked_up_once(asked: dict[str, list[Any]], tmp_path: Path) -> None:
    line = answers._asked(rows_of(tp_size=[1, 2, 3, 4]), str(tmp_path / "out.csv"), 60.0)
    assert asked["lookups"] == [("h200_sxm", "vllm")]
    assert (line["given"], line["asked"], line["answered"], line["refused"]) == (4, 4, 3, {"KeyError": 1})
    assert pd.read_csv(tmp_path / "out.csv")["tpot_ms"].tolist()[:2] == [2.0, 2.0]


def test_no_row_is_asked_once_the_time_is_over(asked: dict[str, list[Any]], tmp_path: Path) -> None:
    line = answers._asked(rows_of(tp_size=[1, 2]), str(tmp_path / "out.csv"), -1.0)
    assert (line["given"], line["asked"], asked["rows"]) == (2, 0, [])
    assert pd.read_csv(tmp_path / "out.csv").empty


def test_what_was_answered_before_an_interrupt_stays(asked: dict[str, list[Any]], tmp_path: Path) -> None:
    def interrupted(*_: Any, **given: Any) -> SimpleNamespace:
        if given["tp_size"] == 2:
            raise KeyboardInterrupt
        return SimpleNamespace(tpot=2.0, ttft=20.0)

    sys.modules[answers.API].cli_estimate = interrupted  # type: ignore[attr-defined]
    line = answers._asked(rows_of(tp_size=[1, 2, 4]), str(tmp_path / "out.csv"), 60.0)
    assert (line["asked"], line["answered"]) == (1, 1)
    assert len(pd.read_csv(tmp_path / "out.csv")) == 1


def test_rows_without_batches_get_those_of_their_clients(asked: dict[str, list[Any]], tmp_path: Path) -> None:
    rows = rows_of(
        mode=["disagg"],
        clients=[100.0],
        decode_num_workers=[2.0],
        decode_attention_dp_size=[8.0],
        prefill_tp_size=[4.0],
    )
    answers._asked(rows, str(tmp_path / "out.csv"), 60.0)
    (_, given) = asked["rows"][0]
    assert (given["prefill_batch_size"], given["decode_batch_size"], given["prefill_tp_size"]) == (1, 7, 4)
