"""Whose turn it is, and which ready candidate an engine gets: shares follow what was earned, nobody starves, nothing is flooded."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from hotpass.records.candidate import Candidate, Reload
from hotpass.records.measurement import Purpose, Tier, Verdict
from search.scheduler import CONTROL, FLOOR, Ready, Shares, arm_of, is_short, pick, reload_of, sure_gain
from tests.search.builders import attempt, part


def play(shares: Shares, arms: dict[str, float | None], turns: int, seconds: float = 1.0) -> Counter[str]:
    """Turns taken and settled one after the other; an arm's candidates all have its speedup, None for failures."""
    names, got = list(arms), Counter[str]()
    for _ in range(turns):
        turn = len(shares.arms) * 1000 + got.total() + sum(arm.attempts for arm in shares.arms.values())
        arm = shares.choose(names)
        shares.take(arm, names, turn)
        speedup = arms[arm]
        verdict = Verdict.FAILED if speedup is None else None
        shares.settle(turn, arm, attempt(f"{arm}-{turn}", "loaded", speedup, verdict=verdict, seconds=seconds))
        got[arm] += 1
    return got


def test_who_earns_gets_more_and_who_does_not_keeps_the_floor() -> None:
    got = play(Shares(), {"optuna": 1.2, "agent:mlp": None, "agent:attention": None}, 200)
    assert got["optuna"] > 110, "the other two keep their floors, and a little while they were unknown"
    assert min(got["agent:mlp"], got["agent:attention"]) >= 0.8 * FLOOR * 200


def test_equal_earners_share_equally() -> None:
    got = play(Shares(), {"screening": 1.1, "agent:mlp": 1.1}, 100)
    assert abs(got["screening"] - got["agent:mlp"]) <= 2


def test_a_newcomer_is_served_soon_and_is_not_owed_the_time_before_it_came() -> None:
    shares = Shares()
    play(shares, {"optuna": 1.1}, 100)
    got = play(shares, {"optuna": 1.1, "agent:new": 1.1}, 20)
    assert 4 <= got["agent:new"] <= 14


def test_time_is_shared_not_turns() -> None:
    """One arm's attempts take four times as long: it gets about a fourth of the turns."""
    shares, got = Shares(), Counter[str]()
    for turn in range(100):
        arm = shares.choose(["quick", "long"])
        shares.take(arm, ["quick", "long"], turn)
        shares.settle(turn, arm, attempt(f"{turn}", "x", verdict=Verdict.FAILED, seconds=4.0 if arm == "long" else 1.0))
        got[arm] += 1
    assert got["quick"] / got["long"] == pytest.approx(4.0, rel=0.3)


def test_turns_under_way_count_so_that_one_arm_does_not_get_them_all() -> None:
    shares = Shares()
    chosen = []
    for turn in range(4):
        chosen.append(shares.choose(["a", "b"]))
        shares.take(chosen[-1], ["a", "b"], turn)
    assert Counter(chosen) == {"a": 2, "b": 2}
    shares.give_back(3)
    assert shares.choose(["a", "b"]) == chosen[3]


def test_the_control_has_its_share_whatever_it_earns() -> None:
    got = play(Shares(control_share=0.25), {"optuna": 1.3, CONTROL: None}, 200)
    assert got[CONTROL] == pytest.approx(50, abs=3)


def test_what_the_control_borrows_is_charged_to_it() -> None:
    shares = Shares(control_share=0.5)
    play(shares, {"optuna": 1.1}, 10)
    for _ in range(10):
        shares.borrow(attempt("x", "loaded", 1.1))
    assert shares.choose(["optuna", CONTROL]) == "optuna"


def test_a_slower_replay_takes_the_gain_back_and_a_cold_one_doubles_it() -> None:
    shares = Shares()
    fast = attempt("c", "loaded", 1.2)
    shares.settle(None, "optuna", fast)
    assert shares.arms["optuna"].gain == pytest.approx(math.log(1.2 * 0.98))
    shares.settle(None, "optuna", attempt("c", "loaded", 1.2, purpose=Purpose.COLD))
    assert shares.arms["optuna"].gain == pytest.approx(2 * math.log(1.2 * 0.98))
    shares.settle(None, "screening", attempt("d", "loaded", 1.5))
    shares.settle(None, "screening", attempt("d", "loaded", 0.8, tier=Tier.SLOW))
    assert shares.arms["screening"].gain == pytest.approx(0.0)


@pytest.mark.parametrize("speedup", [0.9, 1.01, math.inf])
def test_only_a_sure_and_finite_gain_is_earned(speedup: float) -> None:
    assert sure_gain(attempt("c", "loaded", speedup)) == 0.0


def test_arms_by_proposer() -> None:
    assert [arm_of(name) for name in ("random", "optuna", "control:random", "agent:mlp", "mcp:codex")] == [
        "optuna", "optuna", CONTROL, "agent:mlp", "mcp:codex",
    ]  # fmt: skip


def item(number: int, tier: Tier = Tier.FAST, reload: Reload = Reload.HOT) -> Ready:
    return Ready(candidate=Candidate(settings={"threads": number + 1}), tier=tier, reload=reload)


def test_a_replay_goes_first_but_not_on_more_than_half_of_the_engines() -> None:
    waiting = [item(0), item(1, Tier.SLOW)]
    assert pick(waiting, [], 4) == (1, [])
    two = [item(2, Tier.SLOW), item(3, Tier.SLOW)]
    assert pick(waiting, two, 4) == (0, [1])
    assert pick([item(1, Tier.SLOW)], two, 4) == (0, []), "an engine is not left idle for the rule's sake"


def test_long_reloads_do_not_take_every_engine() -> None:
    waiting = [item(0, reload=Reload.REKV), item(1)]
    assert pick(waiting, [], 2) == (0, [])
    assert pick(waiting, [item(2, reload=Reload.RESTART)], 2) == (1, [0])
    assert pick([], [], 2) == (None, [])


def test_a_lane_that_is_full_does_not_keep_others_from_being_proposed() -> None:
    costly = [item(number, reload=Reload.REKV) for number in range(4)]
    assert is_short(costly, 0, 4)
    assert not is_short([item(number) for number in range(4)], 0, 4)
    assert not is_short([item(0)], 3, 4), "what is on the way counts"
    assert not is_short([item(n, reload=Reload.REKV) for n in range(16)], 0, 4), "all lanes together are bounded"


def test_reload_class_is_the_costliest_of_parts_and_settings() -> None:
    from hotpass.records.candidate import PartUse

    hot = part("a", ["model.layers.*.mlp"])
    costly = part("b", ["model.layers.*.self_attn"], reload="rekv")
    assert reload_of(Candidate(parts=(PartUse(source=hot),))) is Reload.HOT
    assert reload_of(Candidate(parts=(PartUse(source=hot), PartUse(source=costly)))) is Reload.REKV
    assert reload_of(Candidate(settings={"compile_mode": "default"})) is Reload.RECAPTURE
