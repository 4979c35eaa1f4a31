"""95 % intervals of what an evaluation measures, and the unbiased pass@k.

They are deterministic: every resampling starts from one fixed seed. Every function takes one entry per independent
item: what belongs together (pieces of one record) is summed before. tests/evaluation/test_intervals.py simulates how
often the intervals contain the truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_ITEMS = 20
"""Independent items below which nothing is decided. At 20, the studentized bootstrap covers 95 % of normal and 92 % of
log-normal differences, the percentile bootstrap 93 % and 86 %; of 2 items the percentile bootstrap covers 53 %."""
NUM_RESAMPLES = 2000
RESAMPLES_AT_ONCE = 100
"""Counts per item in a block of resamples; it bounds memory."""
BOOTSTRAP_SEED = 46
TAIL = 0.025
NORMAL_QUANTILE = 1.959964
"""The 97.5 % quantile of the normal distribution."""
ROUNDING = 1e-12
"""Relative spread below which items differ only by rounding."""

Interval = tuple[float, float]
UNBOUNDED: Interval = (-math.inf, math.inf)
"""The interval of a single item: it says nothing about others."""


class PassAtK(BaseModel):
    """Share of the prompts to which one of k answers is right, estimated without bias from all that were sampled."""

    k: int
    share: float
    interval: Interval | None
    """95 %; None with fewer than two prompts."""


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Interval of sum(numerators) / sum(denominators): long items weigh as they do in the ratio.

    By the studentized bootstrap (Efron and Tibshirani 1993, chapter 12), whose ends are right for skewed items too;
    below MIN_ITEMS items by Student's t, since a resample of few items has too few different values. Items without
    spread give an interval without width.
    """
    import numpy as np

    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    ratio = float(above.sum() / below.sum())
    if len(above) < 2:
        return UNBOUNDED
    residuals = above - ratio * below
    error = _standard_error(float((residuals**2).sum()), len(above), float(below.sum()))
    if error <= ROUNDING * float(np.abs(above).sum() / below.sum()):
        return ratio, ratio
    low, high = (
        (-t_quantile(len(above) - 1), t_quantile(len(above) - 1))
        if len(above) < MIN_ITEMS
        else _studentized(residuals, below)
    )
    return ratio - high * error, ratio - low * error


def _studentized(residuals: NDArray[np.float64], below: NDArray[np.float64]) -> Interval:
    """The 2.5 % and 97.5 % quantiles of (resampled ratio - ratio) / its standard error."""
    import numpy as np

    num_items = len(residuals)
    columns = np.stack([residuals, below, residuals**2, residuals * below, below**2], axis=1)
    chance = np.random.default_rng(BOOTSTRAP_SEED)
    equal = np.full(num_items, 1 / num_items)
    studentized = []
    for _ in range(NUM_RESAMPLES // RESAMPLES_AT_ONCE):
        sums, weights, squares, products, squared_weights = (
            chance.multinomial(num_items, equal, RESAMPLES_AT_ONCE) @ columns
        ).T
        shifts = sums / weights
        spread = np.maximum(squares - 2 * shifts * products + shifts**2 * squared_weights, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            studentized.append(sums / np.sqrt(spread * num_items / (num_items - 1)))
    # A resample of one item over and over has no spread: its quotient is infinite, or 0 / 0 where that item is on the
    # ratio.
    drawn = np.nan_to_num(np.concatenate(studentized), nan=0.0, posinf=np.inf, neginf=-np.inf)
    low, high = np.quantile(drawn, [TAIL, 1 - TAIL], method="inverted_cdf")
    return float(low), float(high)


def _standard_error(sum_of_squares: float, num_items: int, total: float) -> float:
    """Standard error of a ratio, from its residuals' sum of squares and the denominators' sum."""
    return math.sqrt(num_items / (num_items - 1) * sum_of_squares) / total


def t_quantile(degrees_of_freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, 1 - TAIL))


def share_interval(num_right: Sequence[float], num_tried: Sequence[float]) -> Interval:
    """Interval of the share of right answers: Wilson's (1927), at the number of independent tries that would have the
    same standard error. Tries of one item are correlated, so this number is between that of the items and that of all
    tries.
    """
    total = sum(num_tried)
    share = sum(num_right) / total
    if len(num_tried) < 2:
        return UNBOUNDED
    squares = sum((right - share * tried) ** 2 for right, tried in zip(num_right, num_tried, strict=True))
    error = _standard_error(squares, len(num_tried), total)
    effective = min(share * (1 - share) / error**2, total) if error else len(num_tried)
    square = t_quantile(len(num_tried) - 1) ** 2
    centre = (share + square / (2 * effective)) / (1 + square / effective)
    half = (
        math.sqrt(square)
        * math.sqrt(share * (1 - share) / effective + square / (4 * effective**2))
        / (1 + square / effective)
    )
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_share_interval(differences: Sequence[float], num_pairs: Sequence[int]) -> Interval:
    """Interval of the mean difference between two shares on the same items, in -1 .. 1.

    differences: sum over an item's pairs. Two imagined pairs are added, half of one that was lost and half of one that
    was won among them: items that all agree prove no certainty (Agresti and Min 2005 for shares of 0 and 1; here with
    Student's t).
    """
    total = sum(num_pairs) + 2
    mean = sum(differences) / total
    squares = sum((difference - mean * count) ** 2 for difference, count in zip(differences, num_pairs, strict=True))
    num_items = len(differences) + 2
    half = t_quantile(num_items - 1) * _standard_error(squares + 1 + 2 * mean**2, num_items, total)
    return max(-1.0, mean - half), min(1.0, mean + half)


def seed_noise(num_right: Sequence[int], num_sampled: Sequence[int]) -> float:
    """Standard deviation of the mean share of right answers between runs that differ only in the seeds of sampling.

    Every item was answered with several seeds, and the answers differ as they would between runs: a share p of k
    answers has the variance p (1 - p) / (k - 1), estimated without bias. An item with one answer, a greedy one, adds
    none.
    """
    variances = (
        right * (tried - right) / (tried * tried * (tried - 1))
        for right, tried in zip(num_right, num_sampled, strict=True)
        if tried > 1
    )
    return math.sqrt(sum(variances)) / len(num_right)


def seeds_noise_floor(*deviations: float) -> float:
    """What the difference of shares with these `seed_noise`s exceeds one time in twenty where only the seeds differ."""
    return NORMAL_QUANTILE * math.hypot(*deviations)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a right one (Chen et al. 2021, arXiv 2107.03374,
    section 2.1)."""
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_samples} samples is not defined: evaluation.recipe.pass_k must be in "
            f"1..samples_per_problem"
        )
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def best_of_k(num_right: Sequence[int], num_samples: int) -> tuple[PassAtK, ...]:
    """pass@k for k = 1, 2, 4 ... and num_samples, from the number of right answers to every prompt."""
    if not num_right:
        return ()
    powers = [2**power for power in range(num_samples.bit_length()) if 2**power < num_samples]
    curve = []
    for k in (*powers, num_samples):
        passed = [pass_at_k(num_samples, right, k) for right in num_right]
        lower, upper = share_interval(passed, [1] * len(passed))
        interval = (round(lower, 6), round(upper, 6)) if math.isfinite(lower + upper) else None
        curve.append(PassAtK(k=k, share=round(sum(passed) / len(passed), 6), interval=interval))
    return tuple(curve)
