"""PPO phases and reward models as a part of the reward, through launcher, supervisor and worker."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from infra.jobs.launchers import JobFailedError, JobLostError
from model.formats.hf_checkpoint import load_model
from model.text.tokenizer_layout import tokenizer_for_text
from tests.support.training_inputs import TrainingInputs, metrics_of
from tests.training.preference.test_pair_phases import pair_arguments, pair_recipe
from tests.training.test_objectives import ANSWERS, GRPO, course, rl_recipe, sft_recipe
from tests.training.test_phase import SAVE_EVERY_STEP, signal_after_saves

CRITIC = {"discount": 1.0, "gae_lambda": 0.95, "kl_coefficient": 0.02, "value_clip": 0.2, "critic_rate_ratio": 1.0}
PPO = {**GRPO, **CRITIC, "kind": "ppo", "updates_per_rollout": 2}
NUM_STEPS = 12
SCORED = {"rewards": {**GRPO["rewards"], "verified": 0.0, "reward_model": 0.5}, "reward_model": "reward_model"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("ppo") / "home")


@pytest.fixture(scope="module")
def tuned(inputs):
    return inputs.train(inputs.chat_arguments(sft_recipe()))


@pytest.fixture(scope="module")
def reinforced(inputs, tuned):
    recipe = rl_recipe(NUM_STEPS, objective=PPO, max_epochs=30.0)
    return recipe, inputs.train(inputs.prompt_arguments(recipe, ANSWERS, start=tuned))


def test_ppo(reinforced):
    for line in metrics_of(reinforced[1].path("metrics.jsonl")):
        print({k: round(v,4) for k,v in line.items() if k in ("reward_mean","reference_kl","value_loss","explained_variance","critic_grad_norm","clip_fraction")})
    print(sorted(path.name for path in reinforced[1].directory("handover").iterdir()))
    assert 0
