"""Blocks decode as the gguf library decodes them, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engines.prepare import blocks

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def _rows(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of random values by the library, and the values that it reads back from them."""
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    values[0, :32] = 0  # a block whose scale is zero
    kind = gguf.GGMLQuantizationType[name]
    rows = gguf.quants.quantize(values, kind)
    decoded = gguf.quants.dequantize(rows, kind)
    return torch.from_numpy(rows.view(np.uint8).reshape(6, -1)), torch.from_numpy(decoded.reshape(6, 96))


@pytest.mark.parametrize("name", [*QUANTISED, "F16", "BF16"])
def test_values_are_those_of_the_library(name: str) -> None:
    rows, expected = _rows(name)
    values = blocks.dequantize(name, rows)
    assert values.dtype == torch.float32
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))
    assert rows.shape[1] * 8 == 96 * blocks.FORMATS[name].bits_per_value


@pytest.mark.parametrize("name", QUANTISED)
def test_pieces_make_the_values(name: str) -> None:
    rows, expected = _rows(name)
    scale = blocks.scales(name, rows).float().repeat_interleave(32, dim=1)
    minimum = blocks.minimums(name, rows).repeat_interleave(32, dim=1)
    assert torch.equal(scale * blocks.codes(name, rows).float() + minimum, expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_nibbles_hold_value_i_and_i_plus_16(name: str) -> None:
    rows, _ = _rows(name)
    codes = blocks.codes(name, rows).unflatten(1, (3, 32)) & 15
    assert torch.equal(blocks.nibbles(name, rows), codes[..., :16] | (codes[..., 16:] << 4))


def test_plain_formats_have_no_pieces() -> None:
    rows = torch.zeros(2, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="BF16"):
        blocks.codes("BF16", rows)
    with pytest.raises(ValueError, match="Q8_0"):
        blocks.nibbles("Q8_0", rows)
