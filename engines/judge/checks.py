"""Logits held against other logits, as numbers. What they are allowed to be is `verification`'s business.

numpy on one thread on purpose: the judge must not leave a thread pool spinning beside the next window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from hotpass.records.measurement import Agreement, OutputCheck
from hotpass.records.shapes import ShapeRow

DECIDED_MARGIN = 0.1
"""Of the logits' root mean square about their mean: a greedy token that leads by more is decided, whatever the precision. The logits of a
trained model lead by several times that at most positions; rounding everything to bfloat16 moves them by a hundredth of it or two."""

CHUNK_ROWS = 16
"""Rows of logits compared at a time: 16 x 50,000 floats stay in a cache."""


def check_outputs(row: ShapeRow, against: str, got: np.ndarray, want: np.ndarray, noise_abs: float) -> OutputCheck:
    """Compare logits [steps, num_seqs, vocab] with what they should be. `noise_abs`: differences that mean nothing."""
    if got.shape != want.shape:
        raise ValueError(f"{got.shape} against {want.shape}")
    vocab = got.shape[-1]
    rows_got, rows_want = got.reshape(-1, vocab), want.reshape(-1, vocab)
    sums = _Sums()
    for start in range(0, len(rows_got), CHUNK_ROWS):
        sums.add(rows_got[start : start + CHUNK_ROWS], rows_want[start : start + CHUNK_ROWS], noise_abs)
    return OutputCheck(
        row=row,
        against=against,
        max_abs=sums.max_abs,
        rms=math.sqrt(sums.squares / sums.values),
        reference_rms=math.sqrt(sums.reference_squares / sums.values),
        worst_row_rms=sums.worst_row_rms,
        bit_equal=sums.bit_equal,
        positions=sums.positions,
        argmax_agree=sums.agree,
        argmax_clear=sums.clear,
        argmax_clear_agree=sums.clear_agree,
        kl_mean=sums.kl / sums.positions,
        argmax_decided=sums.decided,
        argmax_decided_agree=sums.decided_agree,
        argmax_near=sums.near,
    )


def merged(checks: Iterable[OutputCheck]) -> tuple[OutputCheck, ...]:
    """One check for each row and reference: maxima of maxima, sums of sums, so that a result stays small."""
    groups: dict[tuple[str, str], list[OutputCheck]] = {}
    for check in checks:
        groups.setdefault((check.row.key, check.against), []).append(check)
    return tuple(_merged(group) for group in groups.values())


def agreement(texts: Iterable[tuple[np.ndarray, np.ndarray]], noise_abs: float) -> Agreement:
    """Greedy agreement over texts, each (side, reference) logits [tokens, vocab]."""
    sums, count = _Sums(), 0
    for got, want in texts:
        count += 1
        for start in range(0, len(got), CHUNK_ROWS):
            sums.add(got[start : start + CHUNK_ROWS], want[start : start + CHUNK_ROWS], noise_abs)
    return Agreement(
        texts=count,
        positions=sums.positions,
        agree=sums.agree,
        clear=sums.clear,
        clear_agree=sums.clear_agree,
        noise_abs=noise_abs,
        max_abs=sums.max_abs,
        kl_mean=sums.kl / max(1, sums.positions),
        bit_equal=sums.bit_equal,
    )


class _Sums:
    """What can be added up over rows of logits."""

    def __init__(self) -> None:
        self.positions = self.values = self.agree = self.clear = self.clear_agree = 0
        self.decided = self.decided_agree = self.near = 0
        self.max_abs = self.squares = self.reference_squares = self.worst_row_rms = self.kl = 0.0
        self.bit_equal = True

    def add(self, got: np.ndarray, want: np.ndarray, noise_abs: float) -> None:
        count, vocab = got.shape
        self.positions += count
        self.values += count * vocab
        self.bit_equal &= bool(np.array_equal(got.view(np.int32), want.view(np.int32)))
        if not (np.isfinite(got).all() and np.isfinite(want).all()):
            self.max_abs = self.squares = self.worst_row_rms = self.kl = math.inf
            return
        wide_got, wide_want = got.astype(np.float64), want.astype(np.float64)
        difference = wide_got - wide_want
        row_squares = np.square(difference).sum(axis=1)
        self.max_abs = max(self.max_abs, float(np.abs(difference).max()))
        self.squares += float(row_squares.sum())
        self.worst_row_rms = max(self.worst_row_rms, math.sqrt(float(row_squares.max()) / vocab))
        centred = wide_want - wide_want.mean(axis=1, keepdims=True)
        self.reference_squares += float(np.square(centred).sum())
        self._add_greedy(got, want, noise_abs, np.sqrt(np.square(centred).mean(axis=1)))
        self.kl += float(_kl(wide_want, wide_got).sum())

    def _add_greedy(self, got: np.ndarray, want: np.ndarray, noise_abs: float, scale: np.ndarray) -> None:
        chosen = got.argmax(axis=1)
        agree = chosen == want.argmax(axis=1)
        top = np.partition(want, -2, axis=1)[:, -2:]
        margin = top[:, 1] - top[:, 0]
        clear, decided = margin > 2 * noise_abs, margin > DECIDED_MARGIN * scale
        self.agree += int(agree.sum())
        self.clear += int(clear.sum())
        self.clear_agree += int((agree & clear).sum())
        self.decided += int(decided.sum())
        self.decided_agree += int((agree & decided).sum())
        regret = top[:, 1] - want[np.arange(len(want)), chosen]
        self.near += int((regret <= DECIDED_MARGIN * scale).sum())


def _kl(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """KL(softmax(want) || softmax(got)) of each row, nats."""
    log_want, log_got = _log_softmax(want), _log_softmax(got)
    divergence: np.ndarray = np.maximum((np.exp(log_want) * (log_want - log_got)).sum(axis=1), 0.0)
    return divergence


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _merged(group: list[OutputCheck]) -> OutputCheck:
    positions = sum(check.positions for check in group)

    near = [check.argmax_near for check in group]

    def mean(value: str, power: int) -> float:
        return float(sum(getattr(check, value) ** power * check.positions for check in group) / positions)

    return OutputCheck(
        row=group[0].row,
        against=group[0].against,
        max_abs=max(check.max_abs for check in group),
        rms=math.sqrt(mean("rms", 2)),
        reference_rms=math.sqrt(mean("reference_rms", 2)),
        worst_row_rms=max(check.worst_row_rms for check in group),
        bit_equal=all(check.bit_equal for check in group),
        positions=positions,
        argmax_agree=sum(check.argmax_agree for check in group),
        argmax_clear=sum(check.argmax_clear for check in group),
        argmax_clear_agree=sum(check.argmax_clear_agree for check in group),
        kl_mean=mean("kl_mean", 1),
        argmax_decided=sum(check.argmax_decided for check in group),
        argmax_decided_agree=sum(check.argmax_decided_agree for check in group),
        argmax_near=None if None in near else sum(count or 0 for count in near),
    )
