"""Rows of a harness that publishes its deployments: what is filled in, what stays open, and that others are left alone."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from costmodel.inferencex import LAYOUTS, completed, sizes
from costmodel.inferencex import _runs as published


def row(clients: int, **changes: Any) -> dict[str, Any]:
    """A disaggregated row as exported: GPUs of both workers, experts' ranks of the prefill side."""
    made: dict[str, Any] = {
        "silicon_data_source": f"source_file=2026-03-25.csv; silicon_concurrency={clients}; measured=2026-03-23T13:00:07Z",
        "backend": "trtllm", "backend_version": "0.8.1.post2", "model_path": "deepseek-ai/DeepSeek-R1", "system": "b200_sxm",
        "precision": "fp8", "mode": "disagg", "isl": 1024, "osl": 1024, "tp_size": None, "attention_dp_size": None,
        "prefill_num_workers": None, "prefill_tp_size": 8, "prefill_attention_dp_size": 1, "prefill_moe_tp_size": 1,
        "prefill_moe_ep_size": 8, "decode_num_workers": None, "decode_tp_size": 8, "decode_attention_dp_size": 1,
        "decode_moe_tp_size": 1, "decode_moe_ep_size": 8,
    }  # fmt: skip
    return {**made, **changes}


def filled(clients: int, **changes: Any) -> pd.Series:
    return completed(pd.DataFrame([row(clients, **changes)])).iloc[0]


def test_a_deployment_is_found_by_its_clients() -> None:
    drafting, plain = filled(8), filled(5152)
    assert (drafting.drafts, drafting.decode_num_workers, drafting.open) == (3, 8, 0)
    # Eight workers of plain tensor parallelism, not the experts' ranks of the prefill side.
    assert (drafting.decode_tp_size, drafting.decode_moe_tp_size, drafting.decode_moe_ep_size) == (8, 8, 1)
    assert (plain.drafts, plain.prefill_num_workers, plain.decode_num_workers) == (0, 2, 5)
    assert (plain.decode_tp_size, plain.decode_attention_dp_size, plain.decode_moe_ep_size) == (1, 8, 8)


def test_what_two_deployments_fit_stays_open_without_drafts() -> None:
    both = filled(32)
    assert (both.drafts, both.open, both.decode_num_workers) == (0, 1, 3)
    nothing = filled(31)
    assert pd.isna(nothing.decode_num_workers)


def test_days_and_images_tell_drafts_apart() -> None:
    on = {"backend": "sglang", "backend_version": "0.5.8"}
    source = "source_file=2026-03-25.csv; silicon_concurrency=16; measured={}T19:05"
    assert filled(16, **on, silicon_data_source=source.format("2026-02-13")).drafts == 2
    assert filled(16, **on, silicon_data_source=source.format("2026-02-07")).drafts == 0
    together = {"mode": "agg", "tp_size": 8, "attention_dp_size": 1}
    assert filled(16, **together, backend_version="1.2.0rc6.post3").drafts == 3
    assert filled(16, **{**together, "attention_dp_size": 8}, backend_version="1.2.0rc6.post3").drafts == 1
    assert filled(16, **together, backend_version="1.2.0rc6.post2").drafts == 0


def test_launch_scripts_say_cache_chunk_and_how_long_prompts_wait() -> None:
    alone = {"mode": "agg", "tp_size": 4, "attention_dp_size": 1}
    blackwell = filled(64, **alone, backend="sglang", precision="fp4")
    assert (blackwell.cache_bytes, blackwell.poll_steps, blackwell.chunk_tokens) == (1, 30, 16384)
    hopper = filled(64, **alone, backend="vllm", system="h200_sxm", model_path="openai/gpt-oss-120b")
    assert hopper.cache_bytes == 2


def test_rows_of_the_database_tell_of_the_same_points() -> None:
    said = {"prefill_num_workers": 2.0, "decode_num_workers": 6.0, "prefill_attention_dp_size": 8, "prefill_tp_size": 1}
    told = row(31, **said, silicon_data_source="db-dump/x; silicon_concurrency=31")
    found = completed(pd.DataFrame([told, row(31), row(30)]))
    assert found["decode_num_workers"].tolist()[:2] == [6, 6]
    assert found["prefill_attention_dp_size"].tolist()[:2] == [8, 8]
    assert pd.isna(found["decode_num_workers"][2])


def test_rows_of_others_are_left_alone() -> None:
    others = pd.DataFrame([row(8, silicon_data_source="somebody; silicon_concurrency=8")])
    pd.testing.assert_frame_equal(completed(others), others)


def test_what_is_given_is_not_overwritten() -> None:
    given = filled(8, decode_num_workers=3.0, decode_tp_size=4.0)
    assert (given.decode_num_workers, given.decode_tp_size) == (3, 4)


@pytest.mark.parametrize("word", list(LAYOUTS))
def test_layouts_use_all_their_gpus(word: str) -> None:
    columns = sizes(f"{word}8")
    assert columns["tp_size"] * columns["attention_dp_size"] == 8
    assert columns["moe_tp_size"] * columns["moe_ep_size"] == 8


def test_the_configuration_is_read_whole() -> None:
    runs = [run for section in published().values() for run in section]
    assert len(published()) == 42
    assert len(runs) > 250
    assert all(run.prefill_workers > 0 and run.decode_workers > 0 and run.drafts in (0, 1, 2, 3) for run in runs)
