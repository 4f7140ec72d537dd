"""Records from plain values: the quick way and the one that finds words agree, and what does not fit is named by its place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hotpass.decode import DecodeError, _decode, from_plain, json_safe
from hotpass.decoders import Misfit, decoder_of
from hotpass.records.candidate import AS_LOADED, Candidate, PartSource, PartUse
from hotpass.records.measurement import Attempt, Estimate, Purpose, Tier, Verdict

SOURCE = PartSource(name="p", files=(("part.py", "x"),))
ATTEMPT = Attempt(
    candidate_id="a" * 64,
    incumbent_id=AS_LOADED.id,
    tier=Tier.FAST,
    purpose=Purpose.SEARCH,
    verdict=Verdict.FASTER,
    reason="1.2 x",
    speedup=Estimate(value=1.2, low=1.1, high=math.inf),
    tokens_per_second=None,
    ratios={"tpot": 1.5},
)


@pytest.mark.parametrize(
    "record", [ATTEMPT, AS_LOADED, Candidate(parts=(PartUse(source=SOURCE, params={"n": 1, "b": True, "t": None}),))]
)
def test_a_record_comes_back_by_either_way(record: object) -> None:
    plain = json_safe(record)
    kind: Any = type(record)
    assert from_plain(kind, plain) == decoder_of(kind)(plain) == _decode(kind, plain, "") == record


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (int, True), (int, 1.0), (float, True), (float, "1"), (str, 1), (bool, 0), (None, 0), (dict, []),
        (int | None, "x"), (tuple[int, str], [1]), (tuple[int, ...], {}), (Sequence[int], ["a"]),
        (Mapping[str, int], {"a": "b"}), (Tier, "middling"), (Tier, ["fast"]), (Estimate, {"value": 1.0}),
        (Estimate, {**json_safe(ATTEMPT.speedup), "more": 1}), (Candidate, {**json_safe(AS_LOADED), "id": "0" * 64}),
        (PartSource, {"name": "p", "files": []}), (Estimate, 3),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_either_way(kind: Any, plain: Any) -> None:
    with pytest.raises(Misfit):
        decoder_of(kind)(plain)
    with pytest.raises((DecodeError, TypeError)):
        _decode(kind, plain, "it")


def test_the_place_of_a_misfit_is_named() -> None:
    plain = json_safe(ATTEMPT)
    plain["ratios"]["tpot"] = "wide"
    with pytest.raises(DecodeError, match=r"Attempt\.ratios\['tpot'\]: 'wide' is not float"):
        from_plain(Attempt, plain)


@pytest.mark.parametrize(
    ("kind", "plain", "value"),
    [
        (float, "NaN", math.nan), (float, "-Infinity", -math.inf), (float, 3, 3), (Any, {"x": [1]}, {"x": [1]}),
        (int | float | str | None, "NaN", "NaN"), (int | bool, True, True), (tuple[int, str], [1, "a"], (1, "a")),
        (list[int], [1], [1]), (dict[str, Tier], {"a": "fast"}, {"a": Tier.FAST}),
    ],
)  # fmt: skip
def test_values_keep_their_kind(kind: Any, plain: Any, value: Any) -> None:
    for found in (decoder_of(kind)(plain), _decode(kind, plain, "")):
        assert type(found) is type(value)
        assert found == value or (math.isnan(found) and math.isnan(value))
