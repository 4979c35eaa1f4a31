"""What a policy's step logs beside its rewards: an estimate of the entropy, and where its seconds went."""

from __future__ import annotations

import time

import pytest
import torch

from model.generation.generation import InProcessEngine, Sampling
from model.text.tokenizer_layout import tokenizer_for_text
from tasks.training.policy import rewards
from tasks.training.policy.policy import entropy_estimate
from tasks.training.policy.prompts import Prompt
from tasks.training.policy.rollouts import SAMPLING_PARTS, Rollout, sample_answers
from tests.support.model_recipes import GLM46, random_model
from tests.support.training_inputs import TrainingInputs
from tests.training.policy.test_policy import prompt_named, reward_of
from tests.training.test_objectives import rl_recipe

NUM_SAMPLES = 1500


def rollout_of(log_probabilities: list[float], tool_spans: tuple[tuple[int, int], ...] = ()) -> Rollout:
    answer_ids = [9] * len(log_probabilities)
    return Rollout(prompt_named("p"), [5], answer_ids, log_probabilities, "", reward_of(1.0), tool_spans=tool_spans)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_estimate_is_the_entropy_of_the_distribution_but_for_chance(temperature):
    """One token after one prompt, sampled often: within four standard errors of -sum p log p over the vocabulary."""
    model, prompt = random_model(GLM46), [7, 8, 9]
    engine = InProcessEngine(model, weights_version="0", batch_sequences=500)
    sampling = Sampling(1, temperature, stop_token_ids=(), seed=3)
    sampled = engine.generate([prompt] * NUM_SAMPLES, sampling, "0").sampled_log_probabilities
    logits_V = model(torch.tensor([prompt])).logits_BTV[0, -1] / temperature
    log_p_V = logits_V.log_softmax(-1)
    entropy = float(-(log_p_V.exp() * log_p_V).sum())
    deviation = float((log_p_V.exp() * (log_p_V + entropy) ** 2).sum()) ** 0.5
    assert deviation > 0.05
    estimate = entropy_estimate([rollout_of(values) for values in sampled])
    assert abs(estimate - entropy) < 4 * deviation / NUM_SAMPLES**0.5


def test_tokens_of_tools_are_no_part_of_the_estimate():
    assert entropy_estimate([rollout_of([-1.0, 0.0, 0.0, -2.0], ((1, 3),)), rollout_of([-6.0])]) == pytest.approx(3.0)


def test_what_rewards_take_is_measured_apart_from_sampling(tmp_path, monkeypatch):
    inputs, recipe = TrainingInputs(tmp_path / "home"), rl_recipe()
    prompts = [Prompt(name, "synthetic", "exact", "a?", "[]", "0") for name in ("first", "second")]
    engine = InProcessEngine(random_model(recipe.model), weights_version="7", batch_sequences=8)
    tokenizer = tokenizer_for_text(str(inputs.tokenizer.path("tokenizer.json")))

    def verify_slowly(*arguments: object) -> list[bool | None]:
        time.sleep(0.3)
        return [True] * 8

    monkeypatch.setattr(rewards, "verify_answers", verify_slowly)
    seconds = dict.fromkeys(SAMPLING_PARTS, 0.0)
    for number in (1, 2):
        sample_answers(engine, tokenizer, prompts, recipe, (261,), 7, seconds=seconds)
        assert seconds["reward_seconds"] >= 0.3 * number
    assert seconds["weight_sync_seconds"] == seconds["rollout_seconds"] == 0.0
