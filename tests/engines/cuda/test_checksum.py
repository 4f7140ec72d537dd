"""The checksum of device memory, on a CPU: it is the same arithmetic there."""

from __future__ import annotations

import random

import pytest
import torch

from engines.cuda import checksum as module
from engines.cuda.checksum import checksum, checksum_of

KEY = 0xD1CEB004FEEDFACE
MASK = (1 << 64) - 1


def memory(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_hand(data: torch.Tensor, key: int, start: int = 0) -> int:
    """The same with Python's integers, a word at a time."""
    raw, total = bytes(data.numpy()), 0
    for index in range(len(raw) // 8):
        z = int.from_bytes(raw[8 * index : 8 * index + 8], "little") ^ key
        z = (z + (start // 8 + index) * 0x9E3779B97F4A7C15) & MASK
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = ((z ^ (z >> shift)) * factor) & MASK
        total += z ^ (z >> 31)
    return total & MASK


@pytest.mark.parametrize("num_bytes", [0, 8, 24, 8 * 1000])
@pytest.mark.parametrize("start", [0, 64, 1 << 40])
def test_is_what_it_says(monkeypatch: pytest.MonkeyPatch, num_bytes: int, start: int) -> None:
    monkeypatch.setattr(module, "_CPU_CHUNK", 300)  # so that there are several, and a part of one
    data = memory(num_bytes)
    assert checksum(data, KEY, start) == by_hand(data, KEY, start)


def test_pieces_add_up_to_the_whole() -> None:
    data = memory(8 * 700)
    pieces = checksum(data[: 8 * 123], KEY) + checksum(data[8 * 123 :], KEY, 8 * 123)
    assert pieces & MASK == checksum(data, KEY)


def test_every_single_bit_shows() -> None:
    data = memory(64)
    before = checksum(data, KEY)
    for bit in range(8 * 64):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(data, KEY) != before, bit
        data[bit // 8] ^= 1 << bit % 8
    assert checksum(data, KEY) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_values_that_changed_places_show(dtype: torch.dtype) -> None:
    values = (torch.arange(256) % 100).to(dtype)
    before = checksum(values.view(torch.uint8), KEY)
    rng = random.Random(3)
    for _ in range(200):
        a, b = rng.sample(range(256), 2)
        if values[a] == values[b]:
            continue
        swapped = values.clone()
        swapped[a], swapped[b] = values[b], values[a]
        assert checksum(swapped.view(torch.uint8), KEY) != before


def test_changes_that_compensate_each_other_show() -> None:
    words = torch.arange(1000, dtype=torch.int64)
    before = checksum(words.view(torch.uint8), KEY)
    for a, b, amount in ((0, 1, 1), (17, 900, 1 << 40), (998, 999, -5)):
        changed = words.clone()
        changed[a] += amount
        changed[b] -= amount
        assert int(changed.sum()) == int(words.sum())
        assert checksum(changed.view(torch.uint8), KEY) != before
        changed = words.clone()
        changed[a] ^= amount
        changed[b] ^= amount
        assert checksum(changed.view(torch.uint8), KEY) != before


def test_two_places_made_to_cancel_under_one_key_do_not_under_another() -> None:
    """Each word's mixing can be turned back: who knows the key makes the second word fit. Hence the key stays with the keeper."""
    words = torch.tensor([11, 22], dtype=torch.int64)
    target = checksum(words.view(torch.uint8), KEY)
    forged = words.clone()
    forged[0] = 33
    rest = (target - checksum(forged[:1].view(torch.uint8), KEY)) & MASK
    second = (unmixed(rest) - 0x9E3779B97F4A7C15) & MASK ^ KEY
    forged[1] = second - (1 << 64) if second >> 63 else second
    assert checksum(forged.view(torch.uint8), KEY) == target
    other = KEY ^ 1
    assert checksum(forged.view(torch.uint8), other) != checksum(words.view(torch.uint8), other)


def unmixed(value: int) -> int:
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        folded = value
        for _ in range(3):
            folded = value ^ (folded >> shift)
        value = (folded * pow(factor, -1, 1 << 64)) & MASK
    return value


def test_half_words_are_refused() -> None:
    with pytest.raises(ValueError, match="not whole words"):
        checksum(memory(12), KEY)
    with pytest.raises(ValueError, match="not whole words"):
        checksum(memory(16), KEY, 4)


def test_of_tensors() -> None:
    a, b = torch.randn(5, 3).to(torch.bfloat16), torch.randn(7)
    before = checksum_of([a, b], KEY)
    assert before == checksum_of([a, a.view(-1).view(5, 3), b], KEY), "what shares memory counts once"
    assert before != checksum_of([b, a], KEY)
    with torch.no_grad():
        a[4, 2] += 1  # in the last word, which is padded
    assert before != checksum_of([a, b], KEY)
