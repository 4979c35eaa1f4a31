"""Policy optimization from answers to weighted targets: by groups (GRPO, GSPO), or with a critic (PPO).

GRPO and GSPO follow arXiv 2402.03300 and 2507.18071, without KL as in the GLM-4.5 report; PPO follows arXiv 1707.06347,
with the advantages of tasks/training/policy/critic.py. The gradient of the clipped surrogate
min(ratio A, clip(ratio) A) is that of cross-entropy weighted with ratio x A, and 0 where the clip holds. So training
runs through the fused cross-entropy.

The ratio is the probability under the weights being trained over that under the weights before the step's first update,
both by the trainer's arithmetic: of each token (GRPO, PPO), or the geometric mean over an answer's tokens (GSPO). The
answers were sampled by other arithmetic (decoding with a cache, another engine). A factor of its own corrects that,
trainer / rollout within bounds: truncated or masked importance sampling. A ratio over the rollout's probabilities would
clip differences of rounding: the policy has not changed when its first update begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from configs.schema import ImportanceRecipe, PolicyObjective, PpoObjective
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.ranks import Axis
from tasks.training.policy.answer_rows import AnswerRows, lay_out
from tasks.training.policy.critic import Estimates, critic_batches
from tasks.training.policy.rank_shares import ALONE, share_batches
from tasks.training.policy.rewards import reward_metrics
from tasks.training.policy.rollout_connection import EngineError

if TYPE_CHECKING:
    from tasks.training.policy.rollouts import Rollout

ADVANTAGE_EPS = 1e-6
"""Keeps the quotient finite; groups of equal rewards have the advantage 0 whatever it is."""
MISMATCH_METRICS = ("rollout_log_ratio", "rollout_kl", "truncated_fraction", "clip_fraction")
"""Over the trained answers' tokens: mean |log(trainer / rollout)|, the estimate of KL(rollout | trainer) by expm1(x) -
x, the share whose importance ratio is out of bounds, and the share whose weight is 0 by the clips."""


def refuse_mismatch(metrics: Mapping[str, float], objective: PolicyObjective, step: int) -> None:
    """Raises EngineError where a step's rollout_kl or route_difference is beyond its bound."""
    bounds = {"rollout_kl": "max_kl", "route_difference": "max_route_difference"}
    for metric, bound in bounds.items():
        allowed = getattr(objective.mismatch, bound)
        if metrics.get(metric, 0.0) > allowed:
            raise EngineError(
                f"step {step}: {metric} is {metrics[metric]:.3g}, objective.mismatch.{bound} allows {allowed:g}: the "
                f"answers were not sampled by the weights in training. The optimizer step was not taken: make sure "
                f"that who samples holds these weights in the same dtype, or raise the bound"
            )


def group_advantages(rewards_GS: Tensor) -> Tensor:
    """(r - mean) / (std + eps) within each group of S answers to one prompt; the std is that of the group itself, not
    an estimate."""
    centred_GS = rewards_GS - rewards_GS.mean(1, keepdim=True)
    return centred_GS / (rewards_GS.std(1, keepdim=True, correction=0) + ADVANTAGE_EPS)


def importance_ratios(trainer_BT: Tensor, rows: AnswerRows, recipe: ImportanceRecipe) -> Tensor:
    """p trainer / p rollout of the sampled tokens under the same weights: of each, or the product over its answer."""
    log_ratio_BT = (trainer_BT - rows.rollout_log_probabilities_BT) * rows.is_answer_BT
    if recipe.level == "answers":
        log_ratio_BT = log_ratio_BT.sum(1, keepdim=True).expand_as(log_ratio_BT)
    return log_ratio_BT.exp()


def importance_weights(ratio_BT: Tensor, recipe: ImportanceRecipe) -> Tensor:
    """The ratio where it is within the bounds; outside the bound (truncated importance sampling) or 0 (masked)."""
    bounded_BT = ratio_BT.clamp(recipe.floor, recipe.cap)
    return bounded_BT if recipe.kind == "truncated" else bounded_BT * (bounded_BT == ratio_BT)


def clipped_weights(log_ratio_BT: Tensor, advantages_BT: Tensor, objective: PolicyObjective) -> Tensor:
    """Factor of each token's cross-entropy: advantage x ratio, 0 where the surrogate is clipped and so has no gradient.
    A negative advantage has a second bound on the other side (dual clip)."""
    ratio_BT, low, high = log_ratio_BT.exp(), 1 - objective.clip_low, 1 + objective.clip_high
    is_outside_BT = (ratio_BT < low) | (ratio_BT > objective.dual_clip)
    is_clipped_BT = torch.where(advantages_BT > 0, ratio_BT > high, is_outside_BT)
    return (ratio_BT * advantages_BT).masked_fill(is_clipped_BT, 0.0)


def surrogate_weights(
    now_BT: Tensor, trainer_BT: Tensor, rows: AnswerRows, advantages_BT: Tensor, objective: PolicyObjective
) -> Tensor:
    """Factor of each token's cross-entropy, of which the mean over all tokens is taken, from its log-probability under
    the weights being trained and under those before the first update, both by the trainer."""
    is_answer_BT, log_ratio_BT = rows.is_answer_BT, now_BT - trainer_BT
    num_tokens_B1 = is_answer_BT.sum(1, keepdim=True)
    if objective.kind == "gspo":
        log_ratio_BT = (log_ratio_BT * is_answer_BT).sum(1, keepdim=True).div(num_tokens_B1).expand_as(now_BT)
    weights_BT = clipped_weights(log_ratio_BT, advantages_BT, objective)
    if objective.loss_mean == "answers":
        weights_BT = weights_BT * num_tokens_B1.float().mean() / num_tokens_B1
    return weights_BT


@dataclass(frozen=True)
class PolicyUpdates:
    """The updates of a step, none where it has nothing to learn."""

    policy: list[Callable[[], list[MicroBatch]]]
    """What makes the micro-batches of each, called when the one before it was taken; `metrics` then count it too."""
    critic: list[list[MicroBatch]]
    """The critic's micro-batches of each; none without a critic."""
    metrics: dict[str, float]


def policy_updates(
    log_probabilities: Callable[[AnswerRows], Tensor],
    rollouts: Sequence[Rollout],
    objective: PolicyObjective,
    num_sequences: int,
    device: torch.device,
    critique: Callable[[AnswerRows, Tensor, Tensor], Estimates] | None = None,
    data: Axis = ALONE,
    num_parts: int = 1,
    max_batch_tokens: int = 0,
) -> PolicyUpdates:
    """The updates on a step's answers, and its metrics. All ranks have the same answers and make the same weights and
    metrics of them; each gets the micro-batches of its share of every update's answers over `data`, which are made as
    AnswerRows says for `num_parts` and `max_batch_tokens`.

    `log_probabilities` gives those of the targets under the present weights. `critique` makes advantages of the rows,
    their log-probabilities before the first update and their rewards, for PPO. Without a critic a group of equal
    rewards has no gradient: its answers are left out, so they cost no pass and count in no mean."""
    totals = torch.tensor([rollout.reward.total for rollout in rollouts], device=device)
    rewards_GS = totals.view(-1, objective.samples_per_prompt)
    is_informative_G = (rewards_GS != rewards_GS[:, :1]).any(1)
    metrics = _answer_metrics(rollouts, rewards_GS, is_informative_G)
    is_trained_G = is_informative_G if critique is None else torch.ones_like(is_informative_G)
    is_trained = is_trained_G.repeat_interleave(objective.samples_per_prompt).tolist()
    trained = [rollout for rollout, is_in in zip(rollouts, is_trained, strict=True) if is_in]
    if not trained:
        return PolicyUpdates([], [], metrics)
    rows = lay_out(trained, device, objective.routes == "replay", num_parts, max_batch_tokens)
    trainer_BT = log_probabilities(rows)
    ratio_BT = importance_ratios(trainer_BT, rows, objective.importance)
    metrics |= _mismatch(trainer_BT, ratio_BT, rows, objective.importance)
    importance_BT = importance_weights(ratio_BT, objective.importance)
    groups = torch.arange(len(trained), device=device).view(-1, objective.samples_per_prompt)
    parts = [part.flatten() for part in groups.tensor_split(min(objective.updates_per_rollout, len(groups)))]
    if critique is None:
        critic, advantages_BT = [], group_advantages(rewards_GS[is_trained_G]).view(-1, 1).expand_as(trainer_BT)
    else:
        assert isinstance(objective, PpoObjective), objective
        estimates = critique(rows, trainer_BT, rewards_GS.flatten())
        metrics |= estimates.metrics
        advantages_BT = estimates.advantages_BT
        critic = [critic_batches(rows, estimates, part, objective.value_clip, num_sequences, data) for part in parts]
    shares = [len(part) / len(trained) for part in parts]

    def micro_batches(number: int) -> list[MicroBatch]:
        part = parts[number]
        own = rows.select(part)
        now_BT = log_probabilities(own) if number else trainer_BT[part]
        weights_BT = surrogate_weights(now_BT, trainer_BT[part], own, advantages_BT[part], objective)
        is_weighted_BT = own.is_answer_BT & (advantages_BT[part] != 0)
        if is_weighted_BT.any():
            metrics["clip_fraction"] += shares[number] * float((weights_BT[is_weighted_BT] == 0).float().mean())
        factors_BT, batches = importance_BT[part] * weights_BT, []
        for numbers, is_filler in share_batches(own, torch.arange(len(part), device=device), num_sequences, data):
            batch = own.batch(numbers)
            factors = {"weights_BT": factors_BT[numbers, : batch.width], "temperature": objective.temperature}
            batches.append(batch.micro_batch(is_filler=is_filler, **factors))
        return batches

    return PolicyUpdates([partial(micro_batches, number) for number in range(len(parts))], critic, metrics)


def entropy_estimate(rollouts: Sequence[Rollout]) -> float:
    """Mean -log p, in nats, of the sampled tokens at the temperature of the sampling: a Monte Carlo estimate of the
    policy's entropy per token, as no pass over the vocabulary is taken for it."""
    log_probabilities = [sum(rollout.log_probabilities) for rollout in rollouts]  # 0 where a tool wrote
    return -sum(log_probabilities) / sum(rollout.num_sampled for rollout in rollouts)


def _answer_metrics(rollouts: Sequence[Rollout], rewards_GS: Tensor, is_informative_G: Tensor) -> dict[str, float]:
    """What the answers of a step were worth, before anything is computed of them."""
    return {
        "reward_mean": float(rewards_GS.mean()),
        "reward_std": float(rewards_GS.std(correction=0)),
        **reward_metrics([rollout.reward for rollout in rollouts]),
        "informative_groups": float(is_informative_G.sum()),
        "constant_group_share": 1 - float(is_informative_G.float().mean()),
        "answer_tokens": sum(rollout.num_sampled for rollout in rollouts) / len(rollouts),
        "entropy_estimate": entropy_estimate(rollouts),
        **dict.fromkeys(MISMATCH_METRICS, 0.0),
    }


def _mismatch(trainer_BT: Tensor, ratio_BT: Tensor, rows: AnswerRows, recipe: ImportanceRecipe) -> dict[str, float]:
    """How far sampling and training disagree about the sampled tokens: MISMATCH_METRICS but the clip's."""
    log_ratio_A = (trainer_BT - rows.rollout_log_probabilities_BT)[rows.is_answer_BT]
    ratio_A = ratio_BT[rows.is_answer_BT]
    values = (
        log_ratio_A.abs().mean(),
        (log_ratio_A.expm1() - log_ratio_A).mean(),
        (ratio_A != ratio_A.clamp(recipe.floor, recipe.cap)).float().mean(),
    )
    return dict(zip(MISMATCH_METRICS, torch.stack(values).tolist(), strict=False))
