"""A predicted number with the interval that should hold it nine times in ten."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z90 = 1.645
"""Standard deviations to either side that hold 90 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A prediction with its 90 % interval."""

    value: float
    low: float
    high: float

    @staticmethod
    def around(value: float, spread: float) -> Interval:
        """`spread`: standard deviation of the logarithm."""
        width = math.exp(Z90 * spread)
        return Interval(value=value, low=value / width, high=value * width)
