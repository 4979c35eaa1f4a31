"""Collapse in a bottle: python -m benchmarks.training.collapse [--steps 50] [--seeds 5] [--write]

GRPO of a small mixture of experts, after a few supervised steps, on prompts whose answer counts upwards: the reward is
the share of right digits. The answers are sampled by other weights than those that train: rounded to int8, or several
steps old. Each way is trained without a correction and with the rollout's routes replayed, the old weights also with
truncated (TIS) and masked (MIS) importance sampling. Sampling, updates and routes are the product's own.

The last line is JSON. `ours` is the mean reward at the end, over the seeds, of stale rollouts with the better of TIS
and MIS, `peer` that without a correction. `by_arm` has every arm's mean and standard deviation over the seeds: reward
at the start, at the end and at its best, KL of rollout and trainer, and the share of differing routes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from dataclasses import dataclass

import torch

from benchmarks.results import WRITE_FLAG, report
from configs.load import load_scale
from configs.schema import ImportanceRecipe, PolicyObjective
from model.architecture.losses import IGNORED
from model.architecture.transformer import Glm4Moe
from model.generation.generation import InProcessEngine, Sampling
from model.optimizer.optimizer import build_optimizer, set_learning_rate
from tasks.training.policy.answer_rows import AnswerRows, RouteComparison, target_log_probabilities
from tasks.training.policy.policy import policy_updates
from tasks.training.policy.prompts import Prompt
from tasks.training.policy.rewards import Reward
from tasks.training.policy.rollouts import Rollout, sampling_seed
from tests.support.model_recipes import GLM46

RECIPE = GLM46.model_copy(
    update={
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "n_shared_experts": 0,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "num_nextn_predict_layers": 0,
    }
)
NUM_DIGITS, FIRST, ANSWER_TOKENS = 10, 10, 4
"""Tokens 0 to 9 are digits; FIRST opens a prompt."""
NUM_PROMPTS, GROUP_SIZE = 10, 8
WARM_STEPS, WARM_RATE, RATE = 15, 5e-3, 5e-3
ADAM_EPS = 1e-3
"""As large as a gradient is: with 1e-8 a step has its full size however little the last groups teach."""
STALE_STEPS = 4
FIRST_SEED = 46
MEASURED_EVERY = 10
"""Steps between measurements of what the trained weights themselves answer."""
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
    "int8, replay": Arm(NONE, is_rounded=True, replays=True),
    "stale": Arm(NONE, num_steps_old=STALE_STEPS),
    "stale, TIS": Arm(TRUNCATED, num_steps_old=STALE_STEPS),
    "stale, MIS": Arm(MASKED, num_steps_old=STALE_STEPS),
    "stale, replay": Arm(NONE, num_steps_old=STALE_STEPS, replays=True),
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


def warmed_up(seed: int) -> Glm4Moe:
    """A model that has seen right answers for some steps: what reinforcement learning begins with."""
    torch.manual_seed(seed)
    model = Glm4Moe(RECIPE)
    digits = torch.arange(NUM_DIGITS)
    answers = (digits[:, None] + torch.arange(1, ANSWER_TOKENS + 1)) % NUM_DIGITS
    rows = torch.cat([torch.full((NUM_DIGITS, 1), FIRST), digits[:, None], answers], 1)
    targets = rows[:, 1:].clone()
    targets[:, 0] = IGNORED
    optimizer = torch.optim.AdamW(model.parameters(), WARM_RATE, weight_decay=0.0)
    for _ in range(WARM_STEPS):
        optimizer.zero_grad()
        losses = model(rows[:, :-1], target_ids_BT=targets).losses
        assert losses is not None
        losses.lm.backward()
        optimizer.step()
    return model


def train(arm: Arm, seed: int, num_steps: int) -> dict[str, float]:
    """Train by GRPO: the reward of answers that the trained weights themselves sample, and the mismatch."""
    model, sampler, objective = warmed_up(seed), Glm4Moe(RECIPE), objective_of(arm)
    recipe = (
        load_scale("tiny")
        .phases[0]
        .recipe.optimizer.model_copy(update={"kind": "adamw", "weight_decay": 0.0, "adam_eps": ADAM_EPS})
    )
    optimizer = build_optimizer(model, recipe)
    set_learning_rate(optimizer, RATE)
    earlier = deque([_weights(model)], maxlen=arm.num_steps_old + 1)
    rewards, differences, distances = [mean_reward(model, seed, 0)], [], []
    for step in range(1, num_steps + 1):
        sampler.load_state_dict(earlier[0])
        rollouts = sample(rounded_to_int8(sampler) if arm.is_rounded else sampler, seed, step)
        comparison = RouteComparison(torch.device("cpu"))

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
        earlier.append(_weights(model))
        distances.append(updates.metrics["rollout_kl"])
        differences.append(comparison.share())
        if step % MEASURED_EVERY == 0 or step == num_steps:
            rewards.append(mean_reward(model, seed, step))
    return {
        "start": rewards[0],
        "reward": rewards[-1],
        "best": max(rewards),
        "rollout_kl": statistics.fmean(distances),
        "route_difference": statistics.fmean(differences),
    }


def mean_reward(model: Glm4Moe, seed: int, step: int) -> float:
    """Of answers to every prompt by the model itself."""
    return statistics.fmean(rollout.reward.total for rollout in sample(model, seed + 1_000, step))


def _weights(model: Glm4Moe) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def main() -> None:
    """Train every arm with every seed, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(WRITE_FLAG, action="store_true", help="also write benchmarks/results/collapse.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    started, by_arm = time.monotonic(), {}
    for name, arm in ARMS.items():
        runs = [train(arm, FIRST_SEED + number, given.steps) for number in range(given.seeds)]
        columns = {figure: [run[figure] for run in runs] for figure in runs[0]}
        by_arm[name] = {
            figure: [round(statistics.fmean(values), 4), round(statistics.pstdev(values), 4)]
            for figure, values in columns.items()
        }
        print(f"{name}: {by_arm[name]}", flush=True)
    rescued = max(("stale, TIS", "stale, MIS"), key=lambda name: by_arm[name]["reward"][0])
    report(
        "collapse",
        ours=by_arm[rescued]["reward"][0],
        peer=by_arm["stale"]["reward"][0],
        unit="mean reward at the end",
        correction=rescued,
        steps=given.steps,
        seeds=given.seeds,
        by_arm=by_arm,
        seconds=round(time.monotonic() - started),
    )


if __name__ == "__main__":
    main()
