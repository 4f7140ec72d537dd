"""What a profile is computed from: pauses between operators, and FLOPs that torch's own counter misses on a CPU."""

from __future__ import annotations

import pytest
import torch

from engines.flops import flop_counter
from engines.profile_child import pauses


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        ([], [10.0]),
        ([(0.0, 10.0)], []),
        ([(2.0, 3.0), (5.0, 6.0)], [2.0, 2.0, 4.0]),
        ([(5.0, 6.0), (2.0, 5.5), (3.0, 4.0)], [2.0, 4.0]),
        ([(-5.0, 1.0), (9.0, 20.0), (30.0, 40.0)], [8.0]),
    ],
)
def test_pauses_are_what_no_interval_covers(busy: list[tuple[float, float]], expected: list[float]) -> None:
    assert list(pauses(busy, 0.0, 10.0)) == expected


def test_attention_of_a_cpu_is_counted() -> None:
    query, key = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 32, 16)
    with torch.inference_mode(), flop_counter() as counter:
        torch.nn.functional.scaled_dot_product_attention(query, key, key)
    assert counter.get_total_flops() == 2 * 2 * (2 * 4) * 8 * 32 * 16


def test_recurrent_layers_of_a_cpu_are_counted() -> None:
    layer = torch.nn.LSTM(16, 32)
    with torch.inference_mode(), flop_counter() as counter:
        layer(torch.randn(10, 2, 16))
    assert counter.get_total_flops() == 2 * 10 * 2 * (4 * 32 * 16 + 4 * 32 * 32)
