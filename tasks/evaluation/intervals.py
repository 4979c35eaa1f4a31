"""95 % intervals of what an evaluation measures, and the unbiased pass@k. Deterministic: every resampling starts from one fixed seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

NUM_RESAMPLES = 2000
RESAMPLES_AT_ONCE = 100
"""Bounds memory: a block holds this many counts per item."""
BOOTSTRAP_SEED = 46
NORMAL_QUANTILE = 1.959964
"""Of 97.5 %."""

Interval = tuple[float, float]


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Bootstrap interval of sum(numerators) / sum(denominators) over resampled items: long items weigh as they do in the ratio.

    With ones as denominators it is that of a mean. One item, or equal ones, give an interval without width.
    """
    import numpy as np

    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    chance = np.random.default_rng(BOOTSTRAP_SEED)
    equal = np.full(len(above), 1 / len(above))
    ratios = []
    for _ in range(NUM_RESAMPLES // RESAMPLES_AT_ONCE):
        draws = chance.multinomial(len(above), equal, RESAMPLES_AT_ONCE)
        ratios.append((draws @ above) / (draws @ below))
    lower, upper = np.quantile(np.concatenate(ratios), [0.025, 0.975])
    return float(lower), float(upper)


def mean_interval(values: Sequence[float]) -> Interval:
    """Bootstrap interval of a mean over items."""
    return ratio_interval(values, [1.0] * len(values))


def share_interval(num_right: int, num_tried: int) -> Interval:
    """Wilson's interval of a share of independent tries: it keeps a width where all or none are right (Wilson 1927)."""
    share, square = num_right / num_tried, NORMAL_QUANTILE**2
    centre = (share + square / (2 * num_tried)) / (1 + square / num_tried)
    half = NORMAL_QUANTILE * math.sqrt(share * (1 - share) / num_tried + square / (4 * num_tried**2)) / (1 + square / num_tried)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a right one (Chen et al. 2021, arXiv 2107.03374, section 2.1)."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples is not defined: evaluation.recipe.pass_k must lie in 1..samples_per_problem")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
