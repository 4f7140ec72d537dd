"""A checksum of memory where it lies: integer sums of mixed words, the same on every device, in every order of summation.

    word i ──xor key──► + i · odd ──mix (a bijection of 64 bits)──► sum over all i, modulo 2^64

Each word is mixed with its place before it is added, so that two values that changed places, or one that grew by what another lost,
change the sum as surely as one bit does: by chance it stays with probability 2^-64. Whoever knows the key can make a change that the
sum does not show; so the keeper draws one, and shows it to nobody. This is no hash to name contents by (`memory.sha256_of` is).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

WORD_BYTES = 8
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
"""Odd, so that no two places within 2^64 words are alike (2^64 over the golden ratio)."""
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and odd factors of SplitMix64's output function (Steele, Lea, Flood 2014)."""
_LAST_SHIFT = 31
_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 23
"""Words mixed at a time: what stays in a core's cache; what keeps a GPU busy at 64 MiB of scratch memory twice."""


def checksum(memory: torch.Tensor, key: int, start: int = 0) -> int:
    """Of flat uint8 memory, a multiple of 8 bytes long and aligned; 64 bits, unsigned.

    `start`: byte at which it begins in something larger, so that the sums of the pieces add up to that of the whole, modulo 2^64.
    """
    if memory.numel() % WORD_BYTES or start % WORD_BYTES:
        raise ValueError(f"{memory.numel()} bytes from byte {start} are not whole words")
    words = memory.view(torch.int64)
    chunk = _CPU_CHUNK if memory.device.type == "cpu" else _GPU_CHUNK
    size = min(chunk, words.numel())
    steps = torch.arange(size, dtype=torch.int64, device=memory.device).mul_(_signed(_STEP))
    mixed, shifted = torch.empty_like(steps), torch.empty_like(steps)
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for begin in range(0, words.numel(), chunk):
        piece = words[begin : begin + chunk]
        count = piece.numel()
        z, s = mixed[:count], shifted[:count]
        torch.bitwise_xor(piece, _signed(key), out=z)
        z.add_(steps[:count]).add_(_signed((start // WORD_BYTES + begin) * _STEP))
        for shift, factor in _MIX:
            _fold(z, s, shift)
            z.mul_(_signed(factor))
        _fold(z, s, _LAST_SHIFT)
        total.add_(z.sum())
    return int(total) & _MASK


def checksum_of(tensors: Iterable[torch.Tensor], key: int) -> str:
    """Of the contents of contiguous tensors in their order, as 16 hex digits; those that share memory count once."""
    total, place = 0, 0
    seen: set[tuple[int, int]] = set()
    for tensor in tensors:
        bounds = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        if bounds in seen or not tensor.numel():
            continue
        seen.add(bounds)
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        padding = -flat.numel() % WORD_BYTES
        if padding or flat.storage_offset() % WORD_BYTES:
            flat = torch.nn.functional.pad(flat, (0, padding)) if padding else flat.clone()
        total += checksum(flat, key, place)
        place += flat.numel()
    return f"{total & _MASK:016x}"


def _fold(z: torch.Tensor, scratch: torch.Tensor, shift: int) -> None:
    """z ^= z >> shift, the shift a logical one: torch's copies the sign."""
    torch.bitwise_right_shift(z, shift, out=scratch)
    scratch.bitwise_and_(_MASK >> shift)
    z.bitwise_xor_(scratch)


def _signed(value: int) -> int:
    """The int64 of the same bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
