"""Weights for C++ parts: 16 rows interleaved in a tile, streamed from front to back. What `formats.h` of those parts reads.

    weight [rows, columns] ──storage──► values, or the file's own codes and scales ──► tiles of 16 rows, columns in blocks of 32

    F32   [column][16 rows] float32                                              64 bytes a column
    BF16  [column pair][16 rows][2] bfloat16                                     32
    Q4    a block: [4 groups of 8 columns][16 rows] nibbles, 16 half scales, 16 half minimums     20 bytes for 32 values of a row
    Q8    [columns / 4][16 rows][4] int8, then 16 half scales a block            34

Values are never changed by `fp32` and `gguf`; `bf16` and `int8` round. What is not here: any use of the tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch

from engines.prepare.blocks import codes, minimums, scales
from engines.prepare.store import WeightStore

TILE = 16
"""Rows of a weight that are interleaved; rows of zeros fill the last tile."""
BLOCK = 32
"""Columns that share a scale; every weight has whole blocks."""


class Format(IntEnum):
    """As the C++ numbers them."""

    F32 = 0
    BF16 = 1
    Q4 = 2
    Q8 = 3


class Tiles(NamedTuple):
    """One matrix."""

    format: Format
    rows: int
    """Without the rows that fill the last tile."""
    columns: int
    data: torch.Tensor
    """uint8, flat, whole tiles of a multiple of 64 bytes."""


def pack(w: WeightStore, name: str, storage: str) -> Tiles:
    """A weight as tiles. `storage`: a key of `STORAGES`. Raises ValueError for columns that are not whole blocks."""
    if w[name].shape[1] % BLOCK:
        raise ValueError(f"{name} has {w[name].shape[1]} columns, which are not whole blocks of {BLOCK}")
    return STORAGES[storage](w, name)


def _values(w: WeightStore, name: str, dtype: torch.dtype) -> Tiles:
    tiles = _by_tile(w[name].to(dtype))
    group, kind = (1, Format.F32) if dtype == torch.float32 else (2, Format.BF16)
    data = tiles.view(len(tiles), TILE, -1, group).transpose(1, 2).contiguous()
    rows, columns = w[name].shape
    return Tiles(kind, rows, columns, data.flatten().view(torch.uint8))


def _blocks(w: WeightStore, name: str) -> Tiles:
    """The file's own blocks; a weight that has none of a format known here keeps its values, as bfloat16 where that is exact."""
    found = w.packed(name)
    if found is not None:
        layout, rows = found
        if layout in ("Q4_0", "Q4_1"):
            return _q4(codes(layout, rows), scales(layout, rows), minimums(layout, rows))
        if layout == "Q8_0":
            return _q8(codes(layout, rows), scales(layout, rows))
        if layout == "Q5_0":
            return _q8(codes(layout, rows).to(torch.int8) - 16, scales(layout, rows))
    exact = torch.equal(w[name].to(torch.bfloat16).to(w[name].dtype), w[name])
    return _values(w, name, torch.bfloat16 if exact else torch.float32)


def _int8(w: WeightStore, name: str) -> Tiles:
    """Rounded to 8 bits, one scale for each 32 values of a row."""
    values = w[name].float().view(len(w[name]), -1, BLOCK)
    scale = (values.abs().amax(-1) / 127).half()
    divisor = torch.where(scale > 0, scale.float(), torch.ones(()))
    rounded = (values / divisor[..., None]).round().clamp(-127, 127).to(torch.int8)
    return _q8(rounded.flatten(1), scale)


def _q4(nibbles: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> Tiles:
    """nibbles uint8 [rows, columns]; scale, minimum [rows, columns / 32], minimums exact as halves (-8 times a half is one)."""
    rows, columns = nibbles.shape
    order = [8 * group + 2 * (place % 4) + place // 4 for group in range(4) for place in range(8)]
    pairs = (
        _by_tile(nibbles).view(-1, TILE, columns // BLOCK, BLOCK)[..., order].view(-1, TILE, columns // BLOCK, 4, 4, 2)
    )
    lanes = pairs[..., 0] | pairs[..., 1] << 4  # [tile, 16 rows, block, 4 groups, 4 bytes]
    halves = [_by_tile(half.half()).transpose(1, 2).contiguous().view(torch.uint8) for half in (scale, minimum)]
    return Tiles(Format.Q4, rows, columns, torch.cat([lanes.permute(0, 2, 3, 1, 4).flatten(2), *halves], -1).flatten())


def _q8(values: torch.Tensor, scale: torch.Tensor) -> Tiles:
    """values int8 [rows, columns]; scale half [rows, columns / 32]."""
    rows, columns = values.shape
    quads = _by_tile(values).view(torch.uint8).view(-1, TILE, columns // 4, 4).transpose(1, 2).flatten(1)
    halves = _by_tile(scale).transpose(1, 2).contiguous().view(torch.uint8).flatten(1)
    padding = torch.zeros(len(quads), -(quads.shape[1] + halves.shape[1]) % 64, dtype=torch.uint8)
    return Tiles(Format.Q8, rows, columns, torch.cat([quads, halves, padding], -1).flatten())


def _by_tile(rows: torch.Tensor) -> torch.Tensor:
    """[rows, columns] as [tiles, 16, columns], rows of zeros added to fill the last tile."""
    missing = -len(rows) % TILE
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    return rows.contiguous().view(-1, TILE, rows.shape[1])


STORAGES: dict[str, Callable[[WeightStore, str], Tiles]] = {
    "fp32": lambda w, name: _values(w, name, torch.float32),
    "bf16": lambda w, name: _values(w, name, torch.bfloat16),
    "gguf": _blocks,
    "int8": _int8,
}
"""How a weight is kept → what packs it."""
