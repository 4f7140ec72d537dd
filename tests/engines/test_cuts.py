"""Depths of the fast tier."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.cuts import choose_cuts
from hotpass.records.deployment import ModelRef

MIB = 1 << 20


def model(layers: int, tiny: ModelRef) -> ModelRef:
    """1 M parameters a layer, a head of 1 M."""
    million = 1 << 20
    return replace(tiny, num_layers=layers, vocab_size=1024, hidden_size=1024, num_params=million * (layers + 1))


def test_two_cuts_stream_more_than_three_caches(tiny_model: ModelRef) -> None:
    cuts = choose_cuts(model(64, tiny_model), 2 * MIB, 8)
    # 8 bits: 1 MiB a layer and for the head; more than 6 MiB needs the head and 6 layers.
    assert [len(cut) for cut in cuts] == [6, 12, 64]
    assert cuts[0] == tuple(range(6))


def test_narrower_weights_need_deeper_cuts(tiny_model: ModelRef) -> None:
    depths = [len(choose_cuts(model(64, tiny_model), 2 * MIB, bits)[0]) for bits in (32, 16, 8, 4)]
    assert depths == [1, 3, 6, 12]


@pytest.mark.parametrize(("layers", "expected"), [(24, 3), (23, 1)])
def test_a_model_too_shallow_for_two_cuts_is_measured_whole(layers: int, expected: int, tiny_model: ModelRef) -> None:
    cuts = choose_cuts(model(layers, tiny_model), 2 * MIB, 8)
    assert len(cuts) == expected
    assert cuts[-1] == tuple(range(layers))
