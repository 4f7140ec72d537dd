"""Tiles: where each value lies, and that nothing is lost."""

from __future__ import annotations

import pytest
import torch

from engines.prepare.blocks import codes, minimums, scales
from engines.prepare.store import WeightStore
from engines.prepare.tiles import Format, pack

ROWS, COLUMNS = 18, 64
"""Two tiles, the second with two rows; two blocks."""


def blocks(kind: str, row_bytes: int) -> WeightStore:
    raw = torch.randint(0, 256, (ROWS, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    block = row_bytes // 2
    for start in (0, block):  # scales and minimums that are numbers
        raw[:, start + 1] = 0x3C
        if kind == "Q4_1":
            raw[:, start + 3] = 0xBC
    return WeightStore({"w": torch.zeros(ROWS, COLUMNS)}, {"w": (kind, raw)})


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_values_lie_column_by_column(storage: str) -> None:
    values = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).float()
    tiles = pack(WeightStore({"w": values}), "w", storage)
    dtype, group = (torch.float32, 1) if storage == "fp32" else (torch.bfloat16, 2)
    laid = tiles.data.view(dtype).view(2, COLUMNS // group, 16, group)
    assert (tiles.rows, tiles.columns) == (ROWS, COLUMNS)
    for row, column in ((0, 0), (5, 3), (15, 63), (17, 40)):
        assert laid[row // 16, column // group, row % 16, column % group] == values[row, column].to(dtype)
    assert laid[1, :, 2:].abs().max() == 0


@pytest.mark.parametrize(("kind", "row_bytes"), [("Q4_0", 36), ("Q4_1", 40)])
def test_nibbles_of_neighbours_are_four_bits_below_each_other_in_two_halves(kind: str, row_bytes: int) -> None:
    store = blocks(kind, row_bytes)
    _, raw = store.packed("w") or ("", torch.empty(0))
    tiles = pack(store, "w", "gguf")
    assert (tiles.format, tiles.data.numel()) == (Format.Q4, 2 * 2 * 320)
    laid, wanted = tiles.data.view(2, 2, 320), codes(kind, raw)
    lanes = laid[..., :256].contiguous().view(torch.int32).view(2, 2, 4, 16)
    for row in range(ROWS):
        for column in range(COLUMNS):
            within = column % 8
            place = within // 2 + 4 * (within % 2)
            lane = int(lanes[row // 16, column // 32, column % 32 // 8, row % 16])
            assert lane >> 4 * place & 15 == wanted[row, column]
    halves = laid[..., 256:].contiguous().view(torch.float16).view(2, 2, 2, 16)
    assert torch.equal(halves[0, :, 0].T, scales(kind, raw)[:16])
    assert torch.equal(halves[1, :, 1, :2].T.float(), minimums(kind, raw)[16:])


def test_bytes_lie_by_fours_and_scales_follow() -> None:
    store = blocks("Q8_0", 68)
    _, raw = store.packed("w") or ("", torch.empty(0))
    tiles = pack(store, "w", "gguf")
    assert (tiles.format, tiles.data.numel()) == (Format.Q8, 2 * 2 * 544)
    laid, wanted = tiles.data.view(2, 2 * 544), codes("Q8_0", raw)
    quads = laid[:, :1024].contiguous().view(torch.int8).view(2, 16, 16, 4)
    assert torch.equal(quads.transpose(1, 2).flatten(2).flatten(0, 1)[:ROWS], wanted)
    assert torch.equal(
        laid[:, 1024:].contiguous().view(torch.float16).view(2, 2, 16)[1, :, :2].T, scales("Q8_0", raw)[16:]
    )


def test_a_weight_without_blocks_keeps_its_values() -> None:
    odd, plain = torch.full((16, 32), 1.0001), torch.full((16, 32), 1.5)
    store = WeightStore({"odd": odd, "plain": plain})
    assert pack(store, "odd", "gguf").format is Format.F32
    assert pack(store, "plain", "gguf").format is Format.BF16


def test_int8_rounds_to_the_nearest_of_its_block() -> None:
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    values[3, 32:] = 0
    tiles = pack(WeightStore({"w": values}), "w", "int8")
    kept = tiles.data[:1024].view(torch.int8).view(16, 16, 4).transpose(0, 1).flatten(1).float()
    scale = tiles.data[1024:1088].view(torch.float16).view(2, 16).T.float()
    error = (kept.view(16, 2, 32) * scale[..., None] - values.view(16, 2, 32)).abs()
    assert (error <= scale[..., None] * 0.57).all()
    assert kept[3, 32:].abs().max() == 0


def test_columns_come_in_whole_blocks() -> None:
    with pytest.raises(ValueError, match="48 columns"):
        pack(WeightStore({"w": torch.zeros(16, 48)}), "w", "fp32")
