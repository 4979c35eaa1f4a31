"""The temperature of the sampling rises where rewards stop rising, and goes back where that costs too much."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.schema import DynamicTemperature, PolicyObjective
from tasks.training.policy.dynamic_temperature import step_temperature
from tests.support.training_inputs import TrainingInputs, metrics_of
from tests.training.policy.test_policy import OBJECTIVE
from tests.training.test_objectives import ANSWERS, GRPO, rl_recipe, sft_recipe
from tests.training.test_phase import SAVE_EVERY_STEP, train_through_a_kill

RULE = DynamicTemperature(window_steps=2, min_gain=0.05, max_drop=0.1, factor=1.5, max_temperature=2.0)
ALWAYS = {"window_steps": 1, "min_gain": 10.0, "max_drop": 10.0, "factor": 1.25, "max_temperature": 1.5}


def temperatures(means: list[float], rule: DynamicTemperature | None = RULE) -> list[float]:
    """Of the first step after each window of these mean rewards, and of the steps before."""
    objective = OBJECTIVE.model_copy(update={"dynamic_temperature": rule})
    rewards = [reward for mean in means for reward in (mean - 0.3, mean + 0.3)]
    return [step_temperature(objective, rewards[: 2 * number]) for number in range(len(means) + 1)]


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        ([0.1, 0.2, 0.3, 0.4], [1.0] * 5),
        ([0.2, 0.26, 0.32, 0.34], [1.0, 1.0, 1.0, 1.0, 1.5]),
        ([0.2, 0.2, 0.2, 0.2, 0.2], [1.0, 1.0, 1.5, 2.0, 2.0, 2.0]),
        ([0.4, 0.4, 0.31, 0.31], [1.0, 1.0, 1.5, 2.0, 2.0]),
        ([0.4, 0.4, 0.29, 0.0, 0.9, 0.9], [1.0, 1.0, 1.5, 1.0, 1.0, 1.0, 1.0]),
        ([0.4, 0.4, 0.4, 0.2, 0.2, 0.2], [1.0, 1.0, 1.5, 2.0, 1.5, 1.5, 1.5]),
        ([0.5, 0.2, 0.2, 0.2], [1.0, 1.0, 1.5, 2.0, 2.0]),
    ],
)
def test_it_rises_where_rewards_stop_rising_and_goes_back_once_they_fell_by_too_much(means, expected):
    assert temperatures(means) == expected
    assert temperatures(means, None) == [1.0] * len(expected)


def test_steps_of_a_window_that_is_not_full_decide_nothing():
    objective = OBJECTIVE.model_copy(update={"dynamic_temperature": RULE})
    assert step_temperature(objective, [0.2] * 3) == 1.0 < step_temperature(objective, [0.2] * 4)


def test_a_ceiling_that_is_not_above_the_start_is_refused():
    rule = RULE.model_copy(update={"max_temperature": 1.0})
    with pytest.raises(ValidationError, match=r"max_temperature \(1\) must exceed temperature \(1\)"):
        PolicyObjective.model_validate(OBJECTIVE.model_dump() | {"dynamic_temperature": rule.model_dump()})


def test_a_phase_samples_and_trains_at_the_temperature_of_the_step_also_after_a_kill(tmp_path):
    """mismatch.max_kl holds each step: sampling and training have the same temperature."""
    inputs, other = TrainingInputs(tmp_path / "home"), TrainingInputs(tmp_path / "other")
    tuned = inputs.train(inputs.chat_arguments(sft_recipe()))
    still, rising = (
        rl_recipe(objective=GRPO | {"dynamic_temperature": rule}, max_epochs=20.0) for rule in (None, ALWAYS)
    )
    plain = inputs.train(inputs.prompt_arguments(still, ANSWERS, start=tuned))
    whole = inputs.train(inputs.prompt_arguments(rising, ANSWERS, start=tuned))
    resumed = train_through_a_kill(other, other.prompt_arguments(rising, ANSWERS, SAVE_EVERY_STEP, start=tuned))
    assert resumed.digest == whole.digest
    lines, same = metrics_of(whole.path("metrics.jsonl")), metrics_of(plain.path("metrics.jsonl"))
    assert [line["temperature"] for line in lines] == [1.0, 1.0, 1.25, 1.5]
    assert [line["temperature"] for line in same] == [1.0] * 4
    assert all(lines[step]["entropy_estimate"] == same[step]["entropy_estimate"] for step in (0, 1))
    assert all(lines[step]["entropy_estimate"] > same[step]["entropy_estimate"] for step in (2, 3))
