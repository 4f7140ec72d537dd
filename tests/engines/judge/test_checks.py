"""Logits against logits: numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engines.judge.checks import agreement, check_outputs, merged
from tests.engines.conftest import ROWS

ROW = ROWS[0]


def logits(*rows: list[float]) -> np.ndarray:
    """float32 [1, rows, vocab]"""
    return np.array([rows], np.float32)


def test_numbers_by_hand() -> None:
    want = logits([0.0, 1.0, 2.0], [3.0, 0.0, 0.0])
    got = logits([0.0, 1.0, 2.5], [0.0, 0.0, 1.0])
    check = check_outputs(ROW, "reference", got, want, 0.1)
    assert check.max_abs == 3.0
    assert check.rms == pytest.approx(math.sqrt((0.25 + 9 + 1) / 6))
    assert check.worst_row_rms == pytest.approx(math.sqrt(10 / 3))
    assert check.reference_rms == pytest.approx(math.sqrt((2 + 6) / 6))
    assert (check.positions, check.argmax_agree, check.argmax_clear, check.argmax_clear_agree) == (2, 1, 2, 1)
    assert (check.argmax_decided, check.argmax_decided_agree) == (2, 1)
    assert not check.bit_equal


def test_a_token_is_decided_by_a_tenth_of_the_logits_scale() -> None:
    near, far = [0.0, 1.0, 1.05], [0.0, 1.0, 1.06]  # scale about 0.48 and 0.49
    check = check_outputs(ROW, "reference", logits(near, far), logits(near, far), 0.0)
    assert (check.argmax_clear, check.argmax_decided, check.argmax_decided_agree) == (2, 2, 2)
    near = [0.0, 1.0, 1.04]
    assert check_outputs(ROW, "reference", logits(near), logits(near), 0.0).argmax_decided == 0


def test_a_token_is_near_by_the_references_logit_of_it() -> None:
    want = logits([0.0, 1.0, 1.04], [0.0, 1.0, 1.04], [0.0, 1.0, 1.04])
    got = logits([0.0, 1.0, 1.04], [0.0, 1.1, 1.04], [2.0, 1.0, 1.04])
    check = check_outputs(ROW, "reference", got, want, 0.0)
    assert (check.argmax_agree, check.argmax_near) == (1, 2)
    (both,) = merged([check, check])
    assert both.argmax_near == 4


def test_a_margin_within_the_noise_is_not_clear() -> None:
    want, got = logits([1.0, 1.15, 0.0], [1.0, 5.0, 0.0]), logits([1.15, 1.0, 0.0], [1.0, 5.0, 0.0])
    check = check_outputs(ROW, "reference", got, want, 0.1)
    assert (check.argmax_agree, check.argmax_clear, check.argmax_clear_agree) == (1, 1, 1)


def test_kl_is_of_the_reference_to_the_side() -> None:
    want, got = logits([0.0, 0.0]), logits([0.0, math.log(3)])
    check = check_outputs(ROW, "reference", got, want, 0.0)
    assert check.kl_mean == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), rel=1e-6)


def test_equal_bits_are_not_equal_values() -> None:
    plus, minus = logits([0.0, 1.0]), logits([-0.0, 1.0])
    assert check_outputs(ROW, "incumbent", plus, plus, 0.0).bit_equal
    assert not check_outputs(ROW, "incumbent", minus, plus, 0.0).bit_equal
    assert check_outputs(ROW, "incumbent", minus, plus, 0.0).max_abs == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_wrong(value: float) -> None:
    want = logits(*[[0.0, 1.0]] * 40)
    got = want.copy()
    got[0, 39, 1] = value
    check = check_outputs(ROW, "reference", got, want, 0.0)
    assert check.max_abs == check.rms == check.kl_mean == math.inf
    assert check.positions == 40


def test_merging_equals_checking_together() -> None:
    rng = np.random.default_rng(0)
    want = rng.normal(size=(3, 2, 50)).astype(np.float32)
    got = want + rng.normal(scale=0.05, size=want.shape).astype(np.float32)
    whole = check_outputs(ROW, "reference", got, want, 0.02)
    (together,) = merged([check_outputs(ROW, "reference", got[i : i + 1], want[i : i + 1], 0.02) for i in range(3)])
    assert together.max_abs == whole.max_abs
    assert together.worst_row_rms == whole.worst_row_rms
    for name in ("rms", "reference_rms", "kl_mean"):
        assert getattr(together, name) == pytest.approx(getattr(whole, name))
    for name in ("positions", "argmax_agree", "argmax_clear", "argmax_clear_agree", "bit_equal"):
        assert getattr(together, name) == getattr(whole, name)


def test_merging_keeps_rows_and_references_apart() -> None:
    values = logits([0.0, 1.0])
    checks = [check_outputs(row, to, values, values, 0.0) for row in ROWS for to in ("reference", "incumbent")]
    assert len(merged([*checks, *checks])) == 4


def test_agreement_counts_over_texts() -> None:
    want = np.array([[0.0, 5.0], [5.0, 0.0], [1.0, 1.01]], np.float32)
    got = np.array([[0.0, 5.0], [0.0, 5.0], [1.01, 1.0]], np.float32)
    found = agreement([(got, want), (want, want)], noise_abs=0.1)
    assert (found.texts, found.positions, found.agree, found.clear, found.clear_agree) == (2, 6, 4, 4, 3)
    assert found.max_abs == 5.0
    assert not found.bit_equal


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="against"):
        check_outputs(ROW, "reference", logits([0.0, 1.0]), logits([0.0, 1.0, 2.0]), 0.0)
