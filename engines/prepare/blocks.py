"""Layouts of the GGUF block formats that hotpass keeps, and what a part's `weights` needs to read them. Vectorised torch.

A row of a weight `[out_features, in_features]` is a sequence of blocks of 32 values. All of them decode as

    value = scale * code + minimum

where the product is exact in float32 (a half has 11 significant bits, a code at most 8), so that the order of the
two operations, and whether they are fused, does not change a bit. For one block of 32 values, little-endian:

    format  bytes  layout                                                          code           minimum
    Q4_0     18    half d, 16 bytes: low nibbles are values 0-15, high 16-31       nibble 0..15   -8 d
    Q4_1     20    half d, half m, 16 bytes of nibbles as in Q4_0                  nibble 0..15   m
    Q5_0     22    half d, 4 bytes with bit i = fifth bit of value i, 16 of nibbles   0..31       -16 d
    Q5_1     24    half d, half m, 4 bytes of fifth bits, 16 of nibbles               0..31       m
    Q8_0     34    half d, 32 signed bytes                                         -128..127      0
    F16, BF16  2   one value, no scale                                              -              -

Source: the ggml type definitions (`block_q4_0` and so on) as the `gguf` library's `quants` module decodes them; tests
compare with that library bit for bit. What is not here: K-quants and i-quants (their values are kept, not their blocks).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_VALUES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """Where the pieces of a block lie."""

    name: str
    block_values: int
    """Values in a block."""
    block_bytes: int
    bits: int
    """Bits of a code; 16 for the plain formats."""
    has_minimum: bool = False
    """A half `m` follows the scale."""
    offset: int = 0
    """Code that stands for zero, in formats without a minimum of their own."""

    @property
    def bits_per_value(self) -> float:
        """Bits that are streamed for each value, scales included."""
        return 8 * self.block_bytes / self.block_values

    @property
    def codes_at(self) -> int:
        """Byte at which fifth bits (5-bit formats) or codes begin."""
        return 4 if self.has_minimum else 2


FORMATS = {
    item.name: item
    for item in (
        BlockFormat(name="Q4_0", block_values=32, block_bytes=18, bits=4, offset=8),
        BlockFormat(name="Q4_1", block_values=32, block_bytes=20, bits=4, has_minimum=True),
        BlockFormat(name="Q5_0", block_values=32, block_bytes=22, bits=5, offset=16),
        BlockFormat(name="Q5_1", block_values=32, block_bytes=24, bits=5, has_minimum=True),
        BlockFormat(name="Q8_0", block_values=32, block_bytes=34, bits=8),
        BlockFormat(name="F16", block_values=1, block_bytes=2, bits=16),
        BlockFormat(name="BF16", block_values=1, block_bytes=2, bits=16),
    )
}
"""Formats whose blocks are kept in packed.safetensors."""


def blocks_of(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows uint8 [out_features, row_bytes] as blocks [out_features, num_blocks, block_bytes]: a view."""
    size = FORMATS[name].block_bytes
    return rows.reshape(len(rows), rows.shape[1] // size, size)


def scales(name: str, rows: torch.Tensor) -> torch.Tensor:
    """float16 [out_features, num_blocks]: `d` of each block."""
    return _half(blocks_of(name, _quantised(name, rows)), 0)


def minimums(name: str, rows: torch.Tensor) -> torch.Tensor:
    """float32 [out_features, num_blocks]: what is added to `scale * code`; zeros for Q8_0."""
    layout = FORMATS[name]
    if layout.has_minimum:
        return _half(blocks_of(name, rows), 2).float()
    return scales(name, rows).float() * -float(layout.offset)


def nibbles(name: str, rows: torch.Tensor) -> torch.Tensor:
    """uint8 [out_features, num_blocks, 16] as stored: byte i holds value i (low four bits) and value i + 16 (high).

    For the 5-bit formats these are the low four bits of each code.
    """
    layout = FORMATS[name]
    if layout.bits not in (4, 5):
        raise ValueError(f"{name} has no nibbles")
    return blocks_of(name, rows)[..., -16:]


def codes(name: str, rows: torch.Tensor) -> torch.Tensor:
    """[out_features, in_features], in order: uint8 for 4 and 5 bits, int8 for Q8_0."""
    layout = FORMATS[name]
    blocks = blocks_of(name, _quantised(name, rows))
    if layout.bits == 8:
        return blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    stored = nibbles(name, rows)
    values = torch.cat([stored & 15, stored >> 4], dim=-1)
    if layout.bits == 5:
        values = values | (_fifth_bits(blocks, layout) << 4)
    return values.flatten(1)


def dequantize(name: str, rows: torch.Tensor) -> torch.Tensor:
    """float32 [out_features, in_features]: the values that the file means, bit for bit as the gguf library decodes them."""
    if name in ("F16", "BF16"):
        return rows.contiguous().view(torch.float16 if name == "F16" else torch.bfloat16).float()
    layout = FORMATS[name]
    values = codes(name, rows).view(len(rows), -1, BLOCK_VALUES).float() - layout.offset
    values *= scales(name, rows).float()[..., None]
    if layout.has_minimum:  # elsewhere adding zero would turn -0 into 0
        values += minimums(name, rows)[..., None]
    return values.flatten(1)


def _quantised(name: str, rows: torch.Tensor) -> torch.Tensor:
    if FORMATS[name].bits == 16:
        raise ValueError(f"{name} holds plain values: no scales and no codes")
    return rows


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _fifth_bits(blocks: torch.Tensor, layout: BlockFormat) -> torch.Tensor:
    """uint8 0 or 1 [out_features, num_blocks, 32]."""
    four_bytes = blocks[..., layout.codes_at : layout.codes_at + 4]
    bits: torch.Tensor = (four_bytes[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2)
