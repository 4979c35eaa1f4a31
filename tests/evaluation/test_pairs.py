"""Preference pairs judged: accuracy and calibration with known answers, every bound on each side."""

from __future__ import annotations

import math
import random

import pytest

from configs.load import load_scale
from configs.schema import PhaseRecipe
from tasks.evaluation.bounds import Verdict
from tasks.evaluation.evaluate_pairs import PairEvaluation, calibration_bins, calibration_error, is_right
from tasks.evaluation.intervals import share_interval
from tasks.evaluation.pair_bounds import check_pairs, gain_over_chance

MICRO = load_scale("micro")
REWARD = next(phase for phase in MICRO.phases if phase.name == "reward_model")
SFT = next(phase for phase in MICRO.phases if phase.name == "sft")


def figures(num_right: int, num_pairs: int, *, is_scored: bool = True, error: float = 0.1) -> PairEvaluation:
    share = num_right / num_pairs
    interval = share_interval([1] * num_right + [0] * (num_pairs - num_right), [1] * num_pairs)
    return PairEvaluation(
        num_pairs=num_pairs,
        pair_accuracy=share,
        interval=interval,
        mean_margin=0.1,
        calibration_error=error,
        bins=(),
        accuracy_by_collection=(),
        is_scored=is_scored,
    )


def test_certainties_that_are_the_truth_have_no_calibration_error():
    """Each pair is right as often as its margin says; twice the margin is overconfident by a known amount."""
    draw = random.Random(46)
    margins = [draw.choice((0.3, 0.8, 1.5, 2.5)) for _ in range(40_000)]
    signed = [margin if draw.random() < 1 / (1 + math.exp(-margin)) else -margin for margin in margins]
    assert calibration_error(calibration_bins(signed)) < 0.01
    sigmoid = [1 / (1 + math.exp(-margin)) for margin in (0.3, 0.8, 1.5, 2.5, 0.6, 1.6, 3.0, 5.0)]
    known = sum(sigmoid[index + 4] - sigmoid[index] for index in range(4)) / 4
    doubled = calibration_bins([2 * margin for margin in signed])
    assert calibration_error(doubled) == pytest.approx(known, abs=0.01)
    assert sum(each.num_pairs for each in doubled) == 40_000


def test_bins_are_tenths_of_the_certainty_above_one_half():
    bins = calibration_bins([0.0, 0.1, -0.1, 1e9, -1e9])
    assert [(each.num_pairs, each.accuracy) for each in bins] == [(3, 0.5), (2, 0.5)]
    assert bins[-1].certainty == 1.0 and calibration_error(bins) == pytest.approx((2 * 0.5 + 3 * 0.01665) / 5, abs=1e-3)


@pytest.mark.parametrize(("margin", "right"), [(0.1, 1), (-0.1, 0), (0.0, 0.5), (math.nan, 0), (math.inf, 0)])
def test_a_tie_is_half_right_and_what_is_not_finite_is_wrong(margin, right):
    assert is_right(margin) == right


def bounds(record: PairEvaluation, **changes) -> dict[str, str]:
    verdict = Verdict()
    check_pairs(record, REWARD.recipe.gate.model_copy(update=changes), verdict)
    return {f"{bound.figure} {bound.against}".strip(): bound.outcome for bound in verdict.bounds if bound.is_refusal}


def test_a_reward_model_is_held_to_accuracy_and_calibration():
    held = {"min_pair_accuracy": 0.7, "max_calibration_error": 0.1}
    assert bounds(figures(70, 100), **held) == {}
    assert bounds(figures(69, 100), **held) == {"pair_accuracy": "broken"}
    assert bounds(figures(70, 100, error=0.11), **held) == {"calibration_error": "broken"}
    assert bounds(figures(70, 100, error=0.11, is_scored=False), **held) == {}, "dpo has no scores to calibrate"


def test_worse_than_chance_is_refused_and_no_better_only_where_a_gain_is_asked_for():
    assert bounds(figures(35, 100)) == {"pair_accuracy chance": "broken"}
    assert bounds(figures(55, 100)) == {}
    assert bounds(figures(55, 100), must_gain=True) == {"pair_accuracy chance": "broken"}
    assert bounds(figures(65, 100), must_gain=True) == {}
    assert bounds(figures(19, 19)) == {} and gain_over_chance(figures(19, 19), False).outcome == "undecided"
    assert bounds(figures(19, 19), must_gain=True) == {"pair_accuracy chance": "undecided"}


@pytest.mark.parametrize(
    "changes", [{"min_pair_accuracy": 0.5}, {"max_calibration_error": 0.5}, {"own_figure": "pair_accuracy"}]
)
def test_bounds_on_pairs_belong_to_phases_that_train_on_them(changes):
    tree = SFT.recipe.model_dump()
    with pytest.raises(ValueError, match="are of phases that train on preference pairs, not of objective sft"):
        PhaseRecipe(**tree | {"gate": tree["gate"] | changes})
    tree = REWARD.recipe.model_dump()
    assert PhaseRecipe(**tree | {"gate": tree["gate"] | changes})


def test_a_reward_model_has_no_figure_of_a_language_model_as_its_own():
    tree = REWARD.recipe.model_dump()
    with pytest.raises(ValueError, match="own_figure pass_at_1 with objective reward"):
        PhaseRecipe(**tree | {"gate": tree["gate"] | {"own_figure": "pass_at_1"}})
