"""Intervals and pass@k against slow and simple ones."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from tasks.evaluation.intervals import mean_interval, pass_at_k, ratio_interval, share_interval


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(num_right, k):
    samples = [number < num_right for number in range(5)]
    drawn = [any(draw) for draw in combinations(samples, k)]
    assert pass_at_k(5, num_right, k) == pytest.approx(sum(drawn) / len(drawn))


@pytest.mark.parametrize("k", [0, 6])
def test_more_draws_than_samples_are_refused(k):
    with pytest.raises(ValueError, match="pass_k must lie in"):
        pass_at_k(5, 1, k)


def test_bootstrap_equals_a_naive_loop():
    chance = random.Random(7)
    above, below = [chance.gauss(3, 2) for _ in range(50)], [chance.randrange(1, 9) for _ in range(50)]
    resampled = []
    for _ in range(4000):
        drawn = [chance.randrange(50) for _ in range(50)]
        resampled.append(sum(above[n] for n in drawn) / sum(below[n] for n in drawn))
    resampled.sort()
    assert ratio_interval(above, below) == pytest.approx((resampled[100], resampled[3899]), abs=0.03)
    assert mean_interval([2.0] * 4) == (2.0, 2.0)


@pytest.mark.parametrize(("num_right", "num_tried"), [(0, 30), (7, 30), (30, 30)])
def test_share_interval_ends_where_the_observation_is_just_not_surprising(num_right, num_tried):
    """Wilson's ends are the shares under which the observed one lies 1.96 standard errors off."""
    for end in share_interval(num_right, num_tried):
        if 0 < end < 1:
            error = (end * (1 - end) / num_tried) ** 0.5
            assert abs(num_right / num_tried - end) / error == pytest.approx(1.959964, abs=1e-4)
    lower, upper = share_interval(num_right, num_tried)
    assert lower <= num_right / num_tried <= upper and lower < upper
