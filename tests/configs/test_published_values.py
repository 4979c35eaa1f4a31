"""Rates and epochs that the source documents name stand in the recipes."""

from __future__ import annotations

import pytest

from configs.load import load_scale

RATES = {
    # S4: peak and end of the phase's rate.
    "glm45_355b_pretrain": (1e-4, 1e-5),
    "glm45_air_pretrain": (1e-4, 1e-5),
    "glm45_355b_sft": (5e-6, 0.0),
    "glm45_air_sft": (5e-6, 0.0),
    "glm45_355b_lora": (1e-4, 0.0),
    "glm45_air_lora": (1e-4, 0.0),
    "glm45_355b_dora": (1e-4, 0.0),
    "glm45_air_dora": (1e-4, 0.0),
    # S1: AdamW for all weights.
    "s1_355b_adamw": (3e-4, 3e-5),
}


@pytest.mark.parametrize("name", RATES)
def test_recipes_have_the_published_rates(name):
    scale = load_scale(f"recipes/{name}")
    for phase in scale.phases:
        course = scale.training_recipe(phase).course
        assert (course.peak_learning_rate, course.final_learning_rate) == RATES[name]


@pytest.mark.parametrize("name", ["s0_355b_muon", "s0_64xh100_muon"])
def test_s0s_matrices_train_at_muons_rate_and_the_rest_at_adamws(name):
    scale = load_scale(f"recipes/{name}")
    for phase in scale.phases:
        rate = scale.training_recipe(phase).course.peak_learning_rate
        assert rate == 0.02 and rate * phase.recipe.optimizer.adam_rate_ratio == pytest.approx(3e-4)


def test_full_has_s0s_sft():
    scale = load_scale("full")
    sft = next(phase for phase in scale.phases if phase.name == "sft")
    assert (scale.training_recipe(sft).course.peak_learning_rate, sft.recipe.max_epochs) == (2e-5, 3.0)
