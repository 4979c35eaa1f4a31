"""Draws the course of a number as a line of bars."""

from __future__ import annotations

import math
from statistics import fmean

BARS = "▁▂▃▄▅▆▇█"
MAX_BARS = 24


class Sparkline:
    """All finite values so far, however many: a bar is the mean of equally many of them."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._values: list[float] = []
        self._values_per_bar = 1

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            return
        self._values.append(value)
        if len(self._values) == self._values_per_bar:
            self._means.append(fmean(self._values))
            self._values = []
        if len(self._means) == MAX_BARS:
            self._means = [fmean(pair) for pair in zip(self._means[::2], self._means[1::2], strict=True)]
            self._values_per_bar *= 2

    def __str__(self) -> str:
        """Empty where all bars would have one height."""
        if not self._means or (low := min(self._means)) == (high := max(self._means)):
            return ""
        return "".join(BARS[round((mean - low) / (high - low) * (len(BARS) - 1))] for mean in self._means)
