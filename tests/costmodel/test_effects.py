"""Effects that add in log time: found again, calibrated, wide when little is known, and attributed without a remainder."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from costmodel.effects import Effects, Pair, fit_effects

TRUE = {"a": 0.30, "b": 0.10, "c": -0.20, "d": 0.02, "a(bits=4)": 0.08}


def pair(things: set[str], against: set[str] = frozenset(), noise: float = 0.0, name: str = "") -> Pair:  # type: ignore[assignment]
    value = sum(TRUE[thing] for thing in things) - sum(TRUE[thing] for thing in against) + noise
    return Pair(
        candidate=name or "+".join(sorted(things)),
        things=frozenset(things),
        against=frozenset(against),
        log_speedup=value,
        deviation=0.01,
    )


def everything(noise: float = 0.0, seed: int = 0) -> list[Pair]:
    rng = np.random.default_rng(seed)
    sets = [set(chosen) for count in (1, 2, 3) for chosen in combinations(sorted(TRUE), count)]
    return [pair(things, noise=float(rng.normal(0, noise)) if noise else 0.0) for things in sets]


def test_effects_are_found_again_and_attributed_without_remainder() -> None:
    fit = fit_effects(everything(noise=0.01))
    for thing, effect in TRUE.items():
        assert math.log(fit.predict({thing}).value) == pytest.approx(effect, abs=0.02)
    shares = fit.attribution({"a", "b", "c"})
    assert [share.thing for share in shares] == ["a", "b", "c"]
    assert math.prod(share.speedup.value for share in shares) == pytest.approx(fit.predict({"a", "b", "c"}).value)
    assert fit.held_out_error < 0.02
    assert fit.noise <= 0.02


def test_pairs_against_other_incumbents_speak_of_the_same_effects() -> None:
    fit = fit_effects(
        [pair({"a"}), pair({"a", "b"}, {"a"}), pair({"a", "b", "c"}, {"a", "b"}), pair({"b"}, {"c"}, name="x")]
    )
    assert math.log(fit.predict({"a", "b", "c"}).value) == pytest.approx(0.2, abs=0.03)
    assert math.log(fit.predict({"a", "b"}, {"a", "c"}).value) == pytest.approx(0.3, abs=0.03)


def test_little_is_wide_and_nothing_is_the_prior() -> None:
    nothing = fit_effects([])
    assert nothing.predict({"a"}).value == 1.0
    assert nothing.predict({"a"}).high > 2
    assert not nothing.knows({"a"})
    some = fit_effects([pair({"a"}), pair({"b"})])
    many = fit_effects(everything(noise=0.01))
    width = [fit.predict({"a", "b"}).high / fit.predict({"a", "b"}).low for fit in (nothing, some, many)]
    assert width[0] > width[1] > 1.1 > width[2]
    assert some.knows({"a", "b"})
    assert not some.knows({"a", "c"})
    assert some.predict({"a", "c"}).high / some.predict({"a"}).high > 1.3


def test_intervals_hold_candidates_left_out() -> None:
    pairs = everything(noise=0.08, seed=4)
    held = 0
    for place, out in enumerate(pairs):
        span = fit_effects([*pairs[:place], *pairs[place + 1 :]]).predict(out.things)
        held += span.low <= math.exp(out.log_speedup) <= span.high
    assert held / len(pairs) >= 0.85


def test_the_next_measurement_may_still_win() -> None:
    fit = fit_effects(everything(noise=0.01))
    lead = math.log(fit.predict({"a", "b"}).value)
    waiting = {
        "hopeless": frozenset({"b", "c"}),
        "unknown": frozenset({"a", "b", "new"}),
        "known": frozenset({"b", "d"}),
    }
    assert fit.next_measurement(waiting, lead) == "unknown"
    assert fit.next_measurement({}, lead) is None
    assert fit.chance_above(frozenset({"b", "c"}), lead) < 1e-3 < fit.chance_above(frozenset({"new"}), lead)


def test_versions_are_of_the_content() -> None:
    first = fit_effects(everything())
    assert isinstance(first, Effects)
    assert first.version == fit_effects(everything()).version != fit_effects(everything()[1:]).version
