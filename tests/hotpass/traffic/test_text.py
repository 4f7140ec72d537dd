"""Text: exact lengths, no text twice within a pass, a held-out part, and prefixes that are equal exactly where chains are."""

from __future__ import annotations

import pytest

from hotpass.errors import InputError
from hotpass.traffic import Format, Lengths, Request, TextSource, Traffic, fill, read_traffic, realised
from hotpass.traffic.records import make_traffic
from hotpass.traffic.text import sections

WINDOW = 160
"""Bytes that are enough to know a place in the corpus by."""


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: tuple[int, ...]) -> str:
    return bytes(tokens).decode(errors="ignore")


def traffic_of(*requests: Request) -> Traffic:
    return make_traffic("test", Format.MOONCAKE, requests, has_clock=True, dropped={})


def chained(tokens: int, *hashes: int) -> Request:
    return Request(arrival_ms=0, input_tokens=tokens, output_tokens=1, prefix_hashes=hashes, block_tokens=64)


def test_lengths_are_exact_and_seeds_repeat() -> None:
    first, again, other = TextSource(encode, 1), TextSource(encode, 1), TextSource(encode, 2)
    for length in (1, 7, 5_000, 40_000, 0):
        drawn = first.draw(length)
        assert len(drawn) == length
        assert drawn == again.draw(length)
        assert length < 7 or drawn != other.draw(length)


def test_nothing_is_drawn_twice_within_a_pass() -> None:
    source = TextSource(encode, 3)
    seen: set[tuple[int, ...]] = set()
    while True:
        drawn = source.draw(2_000)
        if source.passes > 1:
            break
        middle = drawn[600 : 600 + WINDOW]
        assert middle not in seen
        seen.add(middle)
    assert len(seen) > 750
    assert source.passes == 2


def test_a_pass_hands_out_the_whole_part() -> None:
    total = sum(len(section.encode()) for section in sections(False))
    source = TextSource(encode, 4)
    assert sorted(source.draw(total)) == sorted(encode("".join(sections(False))))
    assert source.passes == 1
    source.draw(1)
    assert source.passes == 2


def test_the_next_pass_cuts_elsewhere() -> None:
    total = sum(len(section.encode()) for section in sections(True))
    source = TextSource(encode, 5, held_out=True)
    first, second = source.draw(total), source.draw(total)
    assert first != second
    assert sorted(first) == sorted(second)


def test_held_out_text_is_never_drawn_otherwise() -> None:
    used, held_out = "".join(sections(False)), "".join(sections(True))
    assert 0.1 < len(held_out) / (len(used) + len(held_out)) < 0.25
    source = TextSource(encode, 6, held_out=True)
    places = [decode(source.draw(4_000))[500 : 500 + WINDOW] for _ in range(20)]
    assert not any(place in used for place in places)
    assert sum(place in held_out for place in places) >= 15  # the others run across the end of a piece


def test_both_prose_and_code_are_in_both_parts() -> None:
    for part in (False, True):
        text = "".join(sections(part))
        assert text.count("    def ") > 100
        assert text.count(" said ") > 50


def test_special_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="without adding special tokens"):
        TextSource(lambda text: [1, *encode(text)], 1)


def test_a_tokenizer_that_gives_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="gives no token"):
        TextSource(lambda text: [], 1).draw(1)


def test_prompts_share_exactly_their_leading_blocks() -> None:
    traffic = traffic_of(chained(200, 1, 2, 3, 4), chained(192, 1, 2, 5), chained(150, 1, 2, 3), chained(64, 9))
    a, b, c, d = fill(traffic, encode, 11)
    assert [len(prompt) for prompt in (a, b, c, d)] == [200, 192, 150, 64]
    assert a[:128] == b[:128]
    assert a[128:192] != b[128:192]
    assert c == a[:150]
    assert d != a[:64]


def test_a_partial_block_that_is_met_longer_keeps_its_beginning() -> None:
    short, long = fill(traffic_of(chained(70, 1, 2), chained(128, 1, 2)), encode, 11)
    assert long[:70] == short


def test_tokens_beyond_the_blocks_are_not_shared() -> None:
    a, b = fill(traffic_of(chained(90, 1), chained(90, 1)), encode, 11)
    assert a[:64] == b[:64]
    assert a[64:] != b[64:]


def test_lengths_only_is_exact_and_not_content_valid() -> None:
    traffic = read_traffic("chat", limit=20)
    prompts = fill(traffic, encode, 1, limit=10)
    assert len(prompts) == 10
    assert realised(traffic, prompts).exact
    assert traffic.ref.content_valid is False


def test_text_is_kept_and_its_length_recorded() -> None:
    own = Request(arrival_ms=0, input_tokens=4, output_tokens=1, text="a real prompt", lengths=Lengths.GIVEN)
    traffic = traffic_of(own, Request(arrival_ms=0, input_tokens=3, output_tokens=1, text="abc"))
    prompts = fill(traffic, encode, 1)
    assert prompts[0] == tuple(encode("a real prompt"))
    check = realised(traffic, prompts)
    assert (check.asked_tokens, check.realised_tokens, check.mismatched, check.worst) == (7, 16, 1, 9)
    assert not check.exact
    assert traffic.ref.content_valid is True


def merging(text: str) -> list[int]:
    """A toy merging tokenizer: `th`, `in` and runs of spaces are one token, so lengths cannot be told from characters."""
    merged = text.replace("th", "\u0101").replace("in", "\u0102")
    while "  " in merged:
        merged = merged.replace("  ", " ")
    return [ord(character) for character in merged]


def test_merging_tokenizers_get_exact_lengths_and_exact_prefixes() -> None:
    """Ids are cut, never text, so no merge across a border changes a length."""
    a, b = fill(traffic_of(chained(191, 1, 2, 3), chained(130, 1, 2, 4)), merging, 3)
    assert (len(a), len(b)) == (191, 130)
    assert a[:128] == b[:128]
    assert len(TextSource(merging, 4).draw(10_001)) == 10_001
