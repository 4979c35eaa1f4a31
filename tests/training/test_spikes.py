"""Which step is a spike, what is left out, and what stays on disk of it."""

import math
import re

import pytest

from configs.load import load_scale
from configs.schema import SpikeRecipe
from tasks.training.state.spikes import (
    SkippedSteps,
    TakenStep,
    extend_window,
    find_spike,
    is_skipped,
    num_counted_rollbacks,
    read_skipped,
    record_spike,
    skipped_by,
)

RECIPE = SpikeRecipe(
    window_steps=3,
    max_loss_deviations=4 / 1.4826,
    min_loss_ratio=1.5,
    max_grad_norm_ratio=10.0,
    skip_steps=2,
    max_rollbacks=1,
    rollback_window_steps=100,
)
WINDOW = tuple(TakenStep(loss=loss, grad_norm=norm) for loss, norm in ((9.0, 0.1), (3.0, 0.5), (2.0, 5.0)))
"""Medians 3.0 and 0.5; the losses' median absolute deviation is 1."""


@pytest.mark.parametrize(
    ("loss", "grad_norm", "part"),
    [
        (6.999, 5.0, None),
        (7.001, 5.0, r"loss 7.001 is above 7 \(median 3, standard deviation 1.4826\) of 3 steps"),
        (6.0, math.nextafter(5.0, 6), r"gradient norm 5 is above 10 x the median 0.5 of 3 steps"),
        (7.1, 6.0, r"loss 7.1 .* and gradient norm 6 "),
        (math.nan, 0.1, "loss nan and gradient norm 0.1 are not both finite"),
        (1.0, math.inf, "gradient norm inf"),
    ],
)
def test_a_spike_is_far_above_the_median_or_not_finite(loss, grad_norm, part):
    spike = find_spike(RECIPE, WINDOW, 12, loss, grad_norm, loss_is_a_measure=True)
    assert (spike is None) == (part is None)
    if spike is not None:
        assert re.search(part, spike.reason) and spike.step == 12


def of_losses(*losses: float) -> tuple[TakenStep, ...]:
    return tuple(TakenStep(loss=loss, grad_norm=1.0) for loss in losses)


def test_a_rise_from_one_point_eight_is_a_spike_by_the_scale_of_the_configurations_and_noise_is_none():
    recipe = load_scale("full").phases[0].recipe.spikes
    steady = of_losses(*(1.8 + 0.02 * math.sin(step) for step in range(16)))
    assert find_spike(recipe, steady, 17, 2.8, 1.0, loss_is_a_measure=True)
    assert find_spike(recipe, steady, 17, 2.1, 1.0, loss_is_a_measure=True) is None, "many deviations, but no rise"
    # One spike in the window moves neither median nor deviation.
    assert find_spike(recipe, (*steady[1:], *of_losses(50.0)), 18, 2.8, 1.0, loss_is_a_measure=True)
    noisy = of_losses(*(1.8 + 0.4 * math.sin(step) for step in range(16)))
    assert find_spike(recipe, noisy, 17, 2.8, 1.0, loss_is_a_measure=True) is None


def test_only_rollbacks_within_the_window_count():
    skipped = [SkippedSteps(first_step=step, last_step=step) for step in (5, 60, 150)]
    assert [num_counted_rollbacks(RECIPE, skipped, step) for step in (151, 160, 251)] == [2, 1, 0]


def test_before_the_window_is_full_and_for_a_surrogate_only_what_is_not_finite_counts():
    assert find_spike(RECIPE, WINDOW[:2], 3, 1e9, 1e9, loss_is_a_measure=True) is None
    assert find_spike(RECIPE, WINDOW[:2], 3, math.inf, 1.0, loss_is_a_measure=True) is not None
    surrogate = tuple(TakenStep(loss=-1e-9, grad_norm=1.0) for _ in range(3))
    assert find_spike(RECIPE, surrogate, 4, 5.0, 1.0, loss_is_a_measure=False) is None
    assert find_spike(RECIPE, surrogate, 4, 5.0, 11.0, loss_is_a_measure=False) is not None


def test_the_window_holds_the_last_steps():
    window = ()
    for number in range(1, 6):
        window = extend_window(RECIPE, window, float(number), number / 10)
    assert [taken.loss for taken in window] == [3.0, 4.0, 5.0]


def test_steps_up_to_the_spike_are_left_out_and_found_again_after_a_kill(tmp_path):
    first = find_spike(RECIPE, WINDOW, 1, math.nan, math.inf, loss_is_a_measure=True)
    second = find_spike(RECIPE, WINDOW, 8, 100.0, 1.0, loss_is_a_measure=True)
    assert read_skipped(tmp_path) == ()
    for spike, is_rolled_back in ((first, True), (first, True), (second, True), (second, False)):
        record_spike(tmp_path, spike, skipped_by(RECIPE, spike), is_rolled_back, {"pieces": []})
    skipped = read_skipped(tmp_path)
    assert skipped == (SkippedSteps(first_step=1, last_step=1), SkippedSteps(first_step=7, last_step=8))
    assert [step for step in range(1, 10) if is_skipped(skipped, step)] == [1, 7, 8]
    assert len((tmp_path / "spikes.jsonl").read_text().splitlines()) == 3
