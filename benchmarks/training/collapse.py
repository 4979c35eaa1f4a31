"""Collapse in a bottle: python -m benchmarks.training.collapse [--steps 160] [--seeds 5] [--write]

GRPO of a small mixture of experts, from random weights, on prompts whose answer counts upwards: the reward is the share
of right digits. The answers are sampled by other weights than those that train: rounded to int8, or several steps old.
Each way is trained without a correction, with truncated (TIS) and masked (MIS) importance sampling, and rounded weights
also with the rollout's routes replayed. Updates, sampling and routes are the product's own.

The last line is JSON: `ours` is the mean reward at the end with the best correction of the worst case, `peer` that
case without a correction; `by_arm` holds mean and standard deviation over the seeds of every arm: reward at the end and
at its best, in between, and the mismatch.
"""

from __future__ import annotations

import copy
import statistics
from collections import deque
from dataclasses import dataclass

import torch

from configs.load import load_scale
from configs.schema import ImportanceRecipe, ModelRecipe, PolicyObjective
from model.architecture.transformer import Glm4Moe
from model.generation.generation import InProcessEngine, Sampling
from model.optimizer.optimizer import build_optimizer, set_learning_rate
from tasks.training.policy.answer_rows import AnswerRows, RouteComparison, target_log_probabilities
from tasks.training.policy.policy import policy_updates
from tasks.training.policy.prompt_order import Prompt
from tasks.training.policy.rank_shares import ALONE
from tasks.training.policy.rewards import Reward
from tasks.training.policy.rollouts import Rollout, sampling_seed

RECIPE = ModelRecipe(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    n_routed_experts=8,
    n_shared_experts=0,
    num_experts_per_tok=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    n_group=1,
    topk_group=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    attention_bias=True,
    use_qk_norm=True,
    partial_rotary_factor=0.5,
    rope_theta=10_000.0,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    initializer_range=0.1,
    tie_word_embeddings=False,
    num_nextn_predict_layers=0,
)
NUM_DIGITS, FIRST, ANSWER_TOKENS = 10, 10, 8
"""Tokens 0 to 9 are digits; FIRST opens a prompt."""
NUM_PROMPTS, GROUP_SIZE = 10, 8
RATE = 5e-3
STALE_STEPS = 8
MEASURED_SHARE = 0.1
"""Of the last steps, over which the reward at the end is the mean."""
NONE = ImportanceRecipe(kind="truncated", level="tokens", floor=1.0, cap=1.0)
TRUNCATED = ImportanceRecipe(kind="truncated", level="tokens", floor=0.0, cap=2.0)
MASKED = ImportanceRecipe(kind="masked", level="tokens", floor=0.5, cap=2.0)


@dataclass(frozen=True)
class Arm:
    """How answers are sampled, and what is done about it."""

    importance: ImportanceRecipe
    is_rounded: bool = False
    num_steps_old: int = 0
    replays: bool = False


ARMS = {
    "exact": Arm(NONE),
    "int8": Arm(NONE, is_rounded=True),
    "int8, TIS": Arm(TRUNCATED, is_rounded=True),
    "int8, MIS": Arm(MASKED, is_rounded=True),
    "int8, replay": Arm(NONE, is_rounded=True, replays=True),
    "int8, TIS, replay": Arm(TRUNCATED, is_rounded=True, replays=True),
    "stale": Arm(NONE, num_steps_old=STALE_STEPS),
    "stale, TIS": Arm(TRUNCATED, num_steps_old=STALE_STEPS),
    "stale, MIS": Arm(MASKED, num_steps_old=STALE_STEPS),
}


def rounded_to_int8(model: Glm4Moe) -> Glm4Moe:
    """The model with every matrix rounded to 255 levels of its largest element."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                step = parameter.abs().max() / 127
                parameter.copy_((parameter / step).round() * step)
    return model


def reward_of(first: int, answer: list[int]) -> float:
    """Share of the tokens that count upwards from the prompt's digit."""
    wanted = [(first + 1 + index) % NUM_DIGITS for index in range(len(answer))]
    return sum(own == digit for own, digit in zip(answer, wanted, strict=True)) / len(answer)


def sample(model: Glm4Moe, seed: int, step: int) -> list[Rollout]:
    """A group of answers to a prompt of every digit."""
    digits = [digit for digit in range(NUM_PROMPTS) for _ in range(GROUP_SIZE)]
    engine = InProcessEngine(model, weights_version="", batch_sequences=len(digits))
    sampling = Sampling(ANSWER_TOKENS, 1.0, seed=sampling_seed(seed, step), keeps_routes=True)
    generation = engine.generate([[FIRST, digit] for digit in digits], sampling, "")
    assert generation.routes is not None
    rollouts = []
    for digit, answer, likelihood, routes in zip(
        digits, generation.token_ids, generation.sampled_log_probabilities, generation.routes, strict=True
    ):
        worth = reward_of(digit, answer)
        reward = Reward(worth, 0.0, 0.0, True, None, worth)
        prompt = Prompt(str(digit), "digits", "exact", "", "[]", "")
        rollouts.append(Rollout(prompt, [FIRST, digit], answer, likelihood, "", reward, routes))
    return rollouts


def objective_of(arm: Arm) -> PolicyObjective:
    """That of `tiny` with this arm's corrections."""
    (phase,) = [phase for phase in load_scale("tiny").phases if phase.name == "rl_reasoning"]
    changes = {"samples_per_prompt": GROUP_SIZE, "importance": arm.importance}
    return phase.recipe.objective.model_copy(update=changes | {"routes": "replay" if arm.replays else "compare"})


def train(arm: Arm, seed: int, num_steps: int) -> dict[str, float]:
    """Train from random weights: the reward of answers that the trained weights themselves sample, and the mismatch."""
    torch.manual_seed(seed)
    model, objective = Glm4Moe(RECIPE), objective_of(arm)
    recipe = load_scale("tiny").phases[0].recipe.optimizer.model_copy(update={"kind": "adamw", "weight_decay": 0.0})
    optimizer = build_optimizer(model, recipe)
    set_learning_rate(optimizer, RATE)
    earlier = deque([copy.deepcopy(model)], maxlen=arm.num_steps_old + 1)
    rewards, differences, distances = [], [], []
    for step in range(1, num_steps + 1):
        sampler = rounded_to_int8(copy.deepcopy(earlier[0])) if arm.is_rounded else earlier[0]
        rollouts, comparison = sample(sampler, seed, step), RouteComparison()

        def likelihood(rows: AnswerRows, comparison: RouteComparison = comparison) -> torch.Tensor:
            return target_log_probabilities(model, rows, 1.0, len(rows.token_ids_BT), comparison)

        updates = policy_updates(likelihood, rollouts, objective, len(rollouts), torch.device("cpu"))
        for make in updates.policy:
            optimizer.zero_grad()
            for batch in make():
                losses = model(batch.token_ids_BT, **batch.model_arguments).losses
                assert losses is not None
                losses.lm.backward()
            optimizer.step()
        earlier.append(copy.deepcopy(model))
        own = sample(model, seed + 1, step)
        rewards.append(statistics.fmean(rollout.reward.total for rollout in own))
        distances.append(updates.metrics["rollout_kl"])
        differences.append(comparison.share(ALONE))
    num_last = max(1, round(MEASURED_SHARE * num_steps))
    return {
        "reward": statistics.fmean(rewards[-num_last:]),
        "best": max(statistics.fmean(rewards[at : at + num_last]) for at in range(num_steps - num_last + 1)),
        "rollout_kl": statistics.fmean(distances[-num_last:]),
        "route_difference": statistics.fmean(differences[-num_last:]),
    }
