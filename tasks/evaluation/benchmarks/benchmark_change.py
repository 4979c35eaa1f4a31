"""What became of a benchmark's figure where a checkpoint was made into another format."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic import BaseModel

from tasks.evaluation.comparisons import ACCURACY, BITS_PER_BYTE, Difference, FigureChange, ServedFigures

BY_LIKELIHOOD, GREEDY = "choice_accuracy", "arithmetic_accuracy"
"""Figures of the evaluation whose items are answered as those of a benchmark are."""


class BenchmarkChange(BaseModel):
    """The figure by which a benchmark is judged, beside the same of what the format was made from."""

    figure: str
    """Accuracy, or bits per byte, of which less is better."""
    answered_as: str
    """BY_LIKELIHOOD or GREEDY; empty where answers were sampled with several seeds."""
    change: FigureChange

    def difference(self, served: ServedFigures | None) -> Difference:
        """With the noise floor of benchmarks that are not sampled."""
        change, unknown = self.change, (-math.inf, math.inf)
        sign = -1 if self.figure == BITS_PER_BYTE else 1
        by_engine = greedy_noise_floor(self.figure, self.answered_as, served) if self.answered_as else 0.0
        floor = max(change.noise_floor, by_engine)
        return Difference(change.change, change.change_interval or unknown, change.num_items, sign, floor)


def judged_figure(names: Iterable[str]) -> str:
    """The figure of a benchmark that bounds are on; empty where it has none, as patches without a tree."""
    return next((name for name in (ACCURACY, BITS_PER_BYTE) if name in names), "")


def greedy_noise_floor(figure: str, kind: str, served: ServedFigures | None) -> float:
    """The share of the evaluation's items answered in this way that two engines decide differently; 0 for what is
    computed."""
    change = None if served is None or figure == BITS_PER_BYTE else served.figures.get(kind)
    return 0.0 if change is None else change.disagreement
