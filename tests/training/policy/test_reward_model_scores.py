"""A reward model's score as a part of the reward: that of its row in a pair, and stopped where it is no number."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from configs.schema import PolicyObjective
from model.architecture.transformer import Glm4Moe
from model.generation.generation import InProcessEngine
from model.text.tokenizer_layout import tokenizer_for_text
from tasks.data.prompts.verifiers import WrittenAnswer
from tasks.training.loop.frozen_models import score_answers
from tasks.training.parallel.ranks import Ranks
from tasks.training.parallel.trainable import DividedModel
from tasks.training.plan.phase_flops import phase_flops_per_token
from tasks.training.plan.rank_memory import rank_memory
from tasks.training.policy.episodes import EpisodeFigures
from tasks.training.policy.prompts import Prompt
from tasks.training.policy.rank_shares import ALONE
from tasks.training.policy.rewards import Reward, RewardError, add_score, reward_answers, reward_metrics
from tasks.training.policy.rollouts import Rollout, add_scores, describe_groups, sample_answers
from tests.configs.test_phase_graph import CRITIC
from tests.support.model_recipes import random_model
from tests.support.training_inputs import RESOURCES, TrainingInputs
from tests.training.preference.test_pair_losses import ANSWERS, CPU, PROMPTS, pair_rows, reward_model, row_scores
from tests.training.test_objectives import GRPO, rl_recipe

SCORED = GRPO | {"rewards": {**GRPO["rewards"], "reward_model": 0.25}, "reward_model": "reward_model"}


def test_an_answer_has_the_score_that_its_row_of_a_pair_has(tmp_path):
    model, rows = reward_model(), pair_rows(tmp_path)
    expected = row_scores(model, rows.micro_batch([0, 1, 2], CPU)).tolist()
    sequences = [prompt + side for prompt, pair in zip(PROMPTS, ANSWERS, strict=True) for side in pair]
    engine = SimpleNamespace(zero_optimization_stage=lambda: 0)
    whole = DividedModel(engine, model, Ranks(*[ALONE] * 9))  # pyright: ignore[reportArgumentType]
    for bounds in ((1, 0), (4, 0), (6, 0), (1, 30)):
        scores = score_answers(whole, [*sequences, *sequences[:2]], *bounds)
        assert scores[:-2] == pytest.approx(expected, abs=1e-5) and scores[-2:] == scores[:2], "equal to the bit"


def test_the_score_is_weighed_as_it_is_and_logged_like_the_other_parts():
    prompt = Prompt("p", "synthetic", "exact", "?", "[]", "5")
    written = [WrittenAnswer(text, True) for text in ("5<|user|>", "6<|user|>")]
    without = reward_answers([prompt] * 2, written, [2, 2], PolicyObjective(**SCORED))
    assert without[0].reward_model is None and "reward_score" not in reward_metrics(without)
    rewards = [add_score(*each, 0.25, False) for each in zip(without, (-4.0, 8.0), strict=True)]
    assert [reward.total for reward in rewards] == [1.0 - 1.0, 2.0]
    assert [reward.reward_model for reward in rewards] == [-4.0, 8.0]
    assert reward_metrics(rewards)["reward_score"] == 2.0 and reward_metrics(rewards)["pass_rate"] == 0.5


@pytest.mark.parametrize(("score", "paid"), [(8.0, 0.0), (-4.0, -1.0), (math.nan, math.nan)])
def test_an_episode_without_an_answer_earns_nothing_by_its_score(score, paid):
    """It pays a negative one: at 0 a broken call would be worth more than a poor answer."""
    prompt, nothing = Prompt("p", "agentic", "calculator", "?", "[]", "5"), Reward(0.0, 0.0, 0.0, True, None, 0.0)
    endings = ("tool_failed", "answered", None)
    episodes = [None if each is None else EpisodeFigures("calculator", each, (), 0, 0, 0, 0) for each in endings]
    rollouts = [Rollout(prompt, [5], [9], [0.0], "", nothing, episode=episode) for episode in episodes]
    objective = PolicyObjective(**SCORED | {"samples_per_prompt": 3})
    if math.isnan(score):
        with pytest.raises(RewardError, match="step 7: the reward of answer 0 to prompt p is nan"):
            add_scores(rollouts, [score] * 3, objective, 7)
        return
    rewards = [rollout.reward for rollout in add_scores(rollouts, [score] * 3, objective, 7)]
    assert [reward.total for reward in rewards] == [paid, 0.25 * score, 0.25 * score]
    assert [reward.reward_model for reward in rewards] == [score] * 3, "logged as it is"


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_a_score_that_is_no_number_stops_the_phase_and_names_the_prompt(score, tmp_path):
    inputs, recipe = TrainingInputs(tmp_path / "home"), rl_recipe(objective=SCORED)
    prompts = [Prompt(name, "synthetic", "exact", "a?", "[]", "0") for name in ("first", "second")]

    def sample(score_of_sixth: float):
        scores = [0.5] * 5 + [score_of_sixth] + [0.5] * 2
        tokenizer = tokenizer_for_text(str(inputs.tokenizer.path("tokenizer.json")))
        engine = InProcessEngine(random_model(recipe.model), weights_version="7", batch_sequences=8)
        rollouts = sample_answers(engine, tokenizer, prompts, recipe, (261,), 7)
        return add_scores(rollouts, scores, recipe.objective, 7)

    with pytest.raises(RewardError, match=rf"step 7: the reward of answer 1 to prompt second is {score}"):
        sample(score)
    groups = describe_groups(sample(-3.0), 4, 2, 7)
    parts = json.loads(json.dumps(groups[1]))["parts"]
    assert [part["reward_model"] for part in parts] == [0.5, -3.0, 0.5, 0.5]


def test_the_plan_counts_the_models_beside_the_policy():
    """Weights of float32 without ZeRO: 4 bytes an element, router biases too. The scorer has a scalar head and no MTP
    layer."""
    alone = rank_memory(rl_recipe(), RESOURCES)
    scorer, policy = (
        sum(tensor.numel() for tensor in model.state_dict().values())
        for model in (reward_model(), random_model(rl_recipe().model))
    )
    trained = sum(parameter.numel() for parameter in reward_model().parameters())
    scored = rank_memory(rl_recipe(objective=SCORED), RESOURCES)
    assert scored.weights - alone.weights == 4 * scorer
    assert (scored.gradients, scored.optimizer) == (alone.gradients, alone.optimizer)
    small = reward_model().recipe.model_copy(update={"num_hidden_layers": 2, "hidden_size": 32})
    of_its_own = rank_memory(rl_recipe(objective=SCORED, scorer=small.model_dump()), RESOURCES)
    own = sum(tensor.numel() for tensor in Glm4Moe(small, is_scored=True).state_dict().values())
    assert of_its_own.weights - alone.weights == 4 * own < 4 * scorer
    ppo = rank_memory(rl_recipe(objective=SCORED | CRITIC | {"kind": "ppo"}), RESOURCES)
    assert ppo.weights - alone.weights == 4 * (2 * scorer + policy)
    assert ppo.gradients - alone.gradients == 4 * trained and ppo.optimizer > alone.optimizer
    flops = [
        phase_flops_per_token(rl_recipe(objective=objective), 0)
        for objective in (GRPO, GRPO | CRITIC | {"kind": "ppo"})
    ]
    unembedding = (rl_recipe().model.vocab_size - 1) * rl_recipe().model.hidden_size
    assert flops[1] == 2 * flops[0] - 6 * unembedding
