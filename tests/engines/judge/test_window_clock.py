"""Three clocks of one window: the judge's, the child's, and a GPU's events."""

from __future__ import annotations

import numpy as np
import pytest

from engines.judge.windows import Window


@pytest.mark.parametrize(
    ("child", "device", "ratio"),
    [
        (0.99, 0.0, 0.99),
        (0.99, 0.98, 0.98),
        (0.99, 0.40, 0.40),
        (0.50, 0.98, 0.50),
        (1.01, 0.999, 1.01),
    ],
    ids=["a CPU has no events", "all agree", "work that nothing waited for", "a clock that lies", "nearest wins"],
)
def test_the_clock_that_is_furthest_off_counts(child: float, device: float, ratio: float) -> None:
    seconds = 0.02
    window = Window(
        seconds=seconds,
        child_seconds=child * seconds,
        logits=np.zeros(1),
        activation={},
        device_seconds=device * seconds,
    )
    assert window.clock_ratio == pytest.approx(ratio)
