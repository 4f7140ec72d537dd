"""Presets have the statistics that they cite, and are equal everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from hotpass.errors import InputError
from hotpass.traffic import PRESETS, read_traffic, summarize
from hotpass.traffic.presets import value_at, weibull_gap


@pytest.mark.parametrize("name", ["chat", "code", "long-context"])
def test_lengths_have_the_published_percentiles(name: str) -> None:
    summary = summarize(read_traffic(name))
    for field, published in (("input", PRESETS[name].input_tokens), ("output", PRESETS[name].output_tokens)):
        for percentile in (10, 25, 50, 75, 90):
            assert summary[field][f"p{percentile}"] == pytest.approx(published[percentile], rel=0.03, abs=1)
        assert summary[field]["max"] <= published[100]


def test_means_and_rates_agree_with_the_published_ones() -> None:
    chat, long_context = summarize(read_traffic("chat")), summarize(read_traffic("long-context"))
    assert chat["input"]["mean"] == pytest.approx(1154.7, rel=0.03)
    assert chat["output"]["mean"] == pytest.approx(211.1, rel=0.03)
    assert chat["arrival"]["rate_rps"] == pytest.approx(5.5304, rel=0.03)
    assert chat["arrival"]["cv_interarrival"] == pytest.approx(1.094, rel=0.05)
    assert long_context["input"]["mean"] == pytest.approx(12_035, rel=0.03)
    assert long_context["cache"]["ideal_prefix_hit_tokens"] == pytest.approx(0.3736, abs=0.02)


def test_agentic_steps_have_the_published_medians() -> None:
    requests = read_traffic("agentic").requests
    assert np.median([request.input_tokens for request in requests]) == pytest.approx(118_656, rel=0.1)
    assert np.median([request.output_tokens for request in requests]) == pytest.approx(214, rel=0.03)
    assert summarize(read_traffic("agentic"))["cache"]["ideal_prefix_hit_tokens"] == pytest.approx(0.957, abs=0.03)


@pytest.mark.parametrize("limit", [32, 100])
def test_the_first_requests_are_representative(limit: int) -> None:
    few, whole = summarize(read_traffic("chat", limit=limit)), summarize(read_traffic("chat"))
    assert few["input"]["mean"] == pytest.approx(whole["input"]["mean"], rel=0.08)
    assert few["output"]["mean"] == pytest.approx(whole["output"]["mean"], rel=0.08)


def test_a_preset_is_the_same_everywhere() -> None:
    assert {name: read_traffic(name).ref.content_hash[:16] for name in PRESETS} == HASHES


def test_chat_fits_a_small_model_and_agentic_does_not() -> None:
    chat = read_traffic("chat", max_context=8192)
    assert chat.ref.num_requests > 990
    assert chat.ref.num_requests + chat.ref.dropped["beyond-context"] == 1000
    with pytest.raises(InputError, match="1000 beyond-context"):
        read_traffic("agentic", max_context=8192)


def test_value_at_interpolates_logarithms() -> None:
    percentiles = {10.0: 10.0, 50.0: 1000.0}
    assert value_at(percentiles, 0.3) == pytest.approx(100.0)
    assert value_at(percentiles, 0.05) == 10.0
    assert value_at(percentiles, 0.9) == 1000.0


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_mean_and_variation(cv: float) -> None:
    gaps = np.array([weibull_gap(2.0, cv, (i + 0.5) / 200_000) for i in range(200_000)])
    assert gaps.mean() == pytest.approx(2.0, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


HASHES = {
    "chat": "6b780d34b92d0984",
    "code": "5850c4317f0e551a",
    "agentic": "1351308881f6dfd8",
    "long-context": "e7374282bb403265",
}
