"""A policy phase whose answers vLLM itself samples: the weights of every step arrive, its log-probabilities are the
trainer's, and a server that dies is given them again."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from infra.child_process import free_port
from model.formats.hf_checkpoint import load_model
from model.generation.generation import InProcessEngine, Sampling, sampling_draws
from tasks.training.policy.rollout_connection import BrokenWeightsError
from tasks.training.policy.served_engine import ServedEngine
from tests.support.engines.real_vllm import REAL_VLLM, SERVABLE, real_vllm, save_servable
from tests.support.model_recipes import random_model, with_every_expert
from tests.support.training_inputs import RESOURCES, TrainingInputs, metrics_of
from tests.training.test_objectives import ANSWERS, GRPO, rl_recipe, sft_recipe

pytestmark = REAL_VLLM
BOUND = 1e-4
"""Of a token's |log p trainer - log p vLLM| in float32: sums of other orders."""
PROMPTS = [[7 + number] * (1 + number % 5) for number in range(24)]


def distances(hf_dir, made, temperature: float) -> list[float]:
    """Of each token, from the log-probability under our model."""
    model, found = load_model(hf_dir).eval(), []
    for prompt, token_ids, values in zip(PROMPTS, made.token_ids, made.sampled_log_probabilities, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *token_ids]])).logits_BTV[0, len(prompt) - 1 : -1] / temperature
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        found += (torch.tensor(values) - wanted).abs().tolist()
    return found


def test_a_phase_trains_on_what_vllm_samples(tmp_path):
    inputs = TrainingInputs(tmp_path / "home")
    model = with_every_expert(SERVABLE).model_dump()
    start = inputs.train(inputs.chat_arguments(sft_recipe(model=model)))
    objective = {**GRPO, "rollouts": "vllm", "routes": "ignore"}
    recipe = rl_recipe(num_steps=3, model=model, objective=objective)
    with real_vllm(start.directory("hf"), tmp_path / "vllm.log", rollouts=True) as server:
        resources = RESOURCES.model_copy(update={"rollout_server": server.url})
        trained = inputs.train(inputs.prompt_arguments(recipe, ANSWERS, resources, start=start))
    lines = metrics_of(trained.path("metrics.jsonl"))
    print([(line["rollout_log_ratio"], line["reward_mean"]) for line in lines])
    assert len(lines) == 3 and all(line["rollout_log_ratio"] < BOUND for line in lines)
    groups = metrics_of(trained.path("rollouts.jsonl"))
    assert {group["weights_version"] for group in groups} == {
        f"rl_reasoning-{trained.key[:12]}-{step}" for step in (1, 2, 3)
    }
    assert {reward for group in groups for reward in group["rewards"]} == {0.0, 1.0}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_vllm_answers_by_the_weights_that_it_is_given_and_is_waited_for(temperature, tmp_path):
    dirs = [tmp_path / name for name in ("first", "second")]
    for seed, hf_dir in enumerate(dirs):
        save_servable(random_model(SERVABLE, seed=seed, std=0.1), hf_dir)
    port, sampling = free_port(), Sampling(16, temperature, stop_token_ids=(1,), seed=46)
    draws = sampling_draws(sampling, len(PROMPTS))
    with real_vllm(dirs[0], tmp_path / "first.log", port=port, rollouts=True) as server:
        engines = {
            version: ServedEngine("vllm", server.url, hf_dir, version)
            for version, hf_dir in zip("ab", dirs, strict=True)
        }
        made = {version: engine.generate(PROMPTS, sampling, version, draws) for version, engine in engines.items()}
        assert made["a"].token_ids != made["b"].token_ids
        again_a = engines["a"].generate(PROMPTS, sampling, "a", draws)
        assert again_a.token_ids == made["a"].token_ids, "it is given its weights again"
    for version, hf_dir in zip("ab", dirs, strict=True):
        far = distances(hf_dir, made[version], temperature)
        print(f"{len(far)} tokens at {temperature}, largest difference {max(far):.2e}")
        assert max(far) < BOUND
    again = []
    asking = threading.Thread(target=lambda: again.append(engines["b"].generate(PROMPTS, sampling, "b", draws)))
    asking.start()
    with real_vllm(dirs[0], tmp_path / "second.log", port=port, rollouts=True):
        asking.join(600)
    assert again and again[0].token_ids == made["b"].token_ids


def test_vllm_scores_rows_as_our_engine_does(tmp_path):
    dirs = [tmp_path / name for name in ("first", "second")]
    for seed, hf_dir in enumerate(dirs):
        save_servable(random_model(SERVABLE, seed=seed, std=0.1), hf_dir)
    own = InProcessEngine(load_model(dirs[1]), weights_version="b", batch_sequences=1)
    greedy = own.generate(PROMPTS, Sampling(4), "b").token_ids
    pairs = [*zip(PROMPTS, greedy, strict=True)]
    rows = [[*prompt, *token_ids] for prompt, token_ids in pairs]
    with real_vllm(dirs[0], tmp_path / "vllm.log", rollouts=True) as server:
        engine = ServedEngine("vllm", server.url, dirs[1], "b")
        scores, continuations = engine.score(rows), engine.score_continuations(pairs)
    for values, wanted in zip(scores, own.score(rows), strict=True):
        assert values == pytest.approx(wanted, abs=BOUND)
    wanted = own.score_continuations(pairs)
    for ours, theirs in zip(wanted, continuations, strict=True):
        assert theirs.log_probability == pytest.approx(ours.log_probability, abs=4 * BOUND)
    # Rounding may decide between two tokens.
    assert sum(ours.is_greedy == theirs.is_greedy for ours, theirs in zip(wanted, continuations, strict=True)) >= 23


def test_vllm_with_weights_that_are_not_finite_draws_nothing_and_scores_without_numbers(tmp_path):
    model = random_model(SERVABLE, std=0.1)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.up_proj.fill_(math.nan)
    save_servable(model, tmp_path / "broken")
    with real_vllm(tmp_path / "broken", tmp_path / "vllm.log", rollouts=True) as server:
        engine = ServedEngine("vllm", server.url, tmp_path / "broken", "b")
        assert all(math.isnan(value) for row in engine.score([[7, 8, 9], [3, 4]]) for value in row)
        with pytest.raises(BrokenWeightsError, match="no number: the weights are broken"):
            engine.generate(PROMPTS, Sampling(4, 1.0, seed=46), "b")
