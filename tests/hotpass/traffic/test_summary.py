"""Summaries: small cases by hand, and every number of the published statistics."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from hotpass.traffic import Dropped, Format, Request, read_traffic, summarize
from hotpass.traffic.records import make_traffic
from hotpass.traffic.summary import lru_token_hit

TRACES = {
    "mooncake_conversation": "mooncake_conversation_trace.jsonl.gz",
    "mooncake_synthetic": "mooncake_synthetic_trace.jsonl.gz",
    "azure2023_code": "azure2023_code.csv.gz",
    "azure2023_conv": "azure2023_conv.csv.gz",
    "sharegpt_llmservingsim": "sharegpt_llama31_300_blk16.jsonl.gz",
}
TABLES = ("input", "output", "arrival", "cache", "lru_token_hit_by_capacity_Mtok")


@pytest.mark.data
@pytest.mark.parametrize("name", TRACES)
def test_every_published_number(data_folder: Path, name: str) -> None:
    text = (data_folder / "traces" / "trace_stats.json").read_text()
    published = json.loads(text, parse_float=Decimal)[name]
    summary = summarize(read_traffic(data_folder / "traces" / TRACES[name]))
    assert summary["rows"] == published["rows"]
    tables = [table for table in TABLES if table in published]
    assert len(tables) >= 3
    for table in tables:
        assert set(published[table]) <= set(summary[table])
        for key, value in published[table].items():
            assert _as_printed(summary[table][key], value) == float(value), f"{table}.{key}"


def _as_printed(value: float, like: Decimal | int) -> float:
    """The value at the precision that the other was printed with; percentiles were printed whole."""
    decimals = -int(like.as_tuple().exponent) if isinstance(like, Decimal) else 0
    return round(float(value), min(decimals, 9)) if decimals < 6 else pytest.approx(float(value), rel=1e-12).expected


def traffic_of(*requests: Request) -> Any:
    return make_traffic(
        "test", Format.MOONCAKE, requests, has_clock=True, dropped={"no-output": Dropped(requests=2, tokens=9)}
    )


def chained(arrival_ms: float, tokens: int, *hashes: int) -> Request:
    return Request(arrival_ms=arrival_ms, input_tokens=tokens, output_tokens=1, prefix_hashes=hashes, block_tokens=10)


def test_cache_counts_leading_blocks_only() -> None:
    summary = summarize(
        traffic_of(chained(0, 25, 1, 2, 3), chained(1, 15, 1, 2), chained(2, 30, 9, 2, 3), chained(3, 20, 1, 4))
    )
    assert summary["cache"] == {
        "blocks": 10,
        "unique_blocks": 5,
        "ideal_prefix_hit_blocks": 0.3,
        "ideal_prefix_hit_tokens": (15 + 10) / 90,
        "frac_req_hit_gt1block": 0.25,
    }


def test_lru_forgets_the_oldest() -> None:
    requests = [chained(0, 20, 1, 2), chained(1, 20, 3, 4), chained(2, 20, 1, 2)]
    assert lru_token_hit(requests, capacity_blocks=4) == 20 / 60
    assert lru_token_hit(requests, capacity_blocks=3) == 0.0


def test_arrivals_by_hand() -> None:
    summary = summarize(traffic_of(*(chained(ms, 20, 1, 2) for ms in (0, 0, 500, 2000))))["arrival"]
    assert summary["span_s"] == 2.0
    assert summary["rate_rps"] == 2.0
    assert summary["zero_gap_frac"] == pytest.approx(1 / 3)
    assert summary["peak_1s"] == 3
    assert summary["idx_disp_1s"] == pytest.approx(
        ((3 - 4 / 3) ** 2 + (0 - 4 / 3) ** 2 + (1 - 4 / 3) ** 2) / 3 / (4 / 3)
    )


def test_dropped_is_part_of_the_summary() -> None:
    assert summarize(traffic_of(chained(0, 20, 1, 2)))["dropped"] == {"no-output": {"requests": 2, "tokens": 9}}


def test_no_arrivals_without_a_clock() -> None:
    assert "arrival" not in summarize(traffic_of(chained(0, 20, 1, 2), chained(0, 20, 1, 2)))
