"""Group relative policy optimization (GRPO), and that of whole sequences (GSPO): from answers to weighted targets.

They follow arXiv 2402.03300 and 2507.18071, without KL as in the GLM-4.5 report. The gradient of the clipped surrogate
min(ratio A, clip(ratio) A) is that of cross-entropy weighted with ratio x A, and 0 where the clip holds. So training
runs through the fused cross-entropy.

The ratio is the probability under the weights being trained over that under the weights before the step's first update,
both by the trainer's arithmetic: of each token (GRPO), or the geometric mean over an answer's tokens (GSPO). The
answers were sampled by other arithmetic (decoding with a cache, another engine). A factor of its own corrects that,
min(trainer / rollout, importance_cap): truncated importance sampling. A ratio over the rollout's probabilities would
clip differences of rounding: the policy has not changed when its first update begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from configs.schema import PolicyObjective
from model.architecture.losses import IGNORED
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.policy.rewards import reward_metrics

if TYPE_CHECKING:
    from model.architecture.transformer import Glm4Moe
    from tasks.training.policy.rollouts import Rollout

ADVANTAGE_EPS = 1e-6
"""Keeps the quotient finite; groups of equal rewards have the advantage 0 whatever it is."""
MISMATCH_METRICS = ("rollout_log_ratio", "rollout_kl", "truncated_fraction", "clip_fraction")
"""Over the trained answers' tokens: mean |log(trainer / rollout)|, the estimate of KL(rollout | trainer) by expm1(x) -
x, the share whose importance weight is truncated, and the share whose weight is 0 by the clip."""


@dataclass(frozen=True)
class AnswerRows:
    """Rollouts as rows, padded at the end to the longest: an answer does not see its padding, which carries no loss."""

    token_ids_BT: Tensor
    target_ids_BT: Tensor
    """The answer's tokens, IGNORED elsewhere."""
    rollout_log_probabilities_BT: Tensor
    """Log-probabilities of the targets when they were sampled."""

    @property
    def is_answer_BT(self) -> Tensor:
        return self.target_ids_BT != IGNORED


def group_advantages(rewards_GS: Tensor) -> Tensor:
    """(r - mean) / (std + eps) within each group of S answers to one prompt; the std is that of the group itself, not
    an estimate."""
    centred_GS = rewards_GS - rewards_GS.mean(1, keepdim=True)
    return centred_GS / (rewards_GS.std(1, keepdim=True, correction=0) + ADVANTAGE_EPS)


def importance_weights(trainer_BT: Tensor, rollout_BT: Tensor, cap: float) -> Tensor:
    """min(p trainer / p rollout, cap) from log-probabilities of the sampled tokens under the same weights."""
    return (trainer_BT - rollout_BT).exp().clamp(max=cap)


def clipped_weights(log_ratio_BT: Tensor, advantages_B: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Factor of each token's cross-entropy: advantage x ratio, 0 where the surrogate is clipped and so has no
    gradient."""
    ratio_BT, advantages_BT = log_ratio_BT.exp(), advantages_B[:, None].expand_as(log_ratio_BT)
    is_clipped_BT = torch.where(advantages_BT > 0, ratio_BT > 1 + clip_high, ratio_BT < 1 - clip_low)
    return (ratio_BT * advantages_BT).masked_fill(is_clipped_BT, 0.0)


def surrogate_weights(
    now_BT: Tensor, trainer_BT: Tensor, rows: AnswerRows, advantages_B: Tensor, objective: PolicyObjective
) -> Tensor:
    """Factor of each token's cross-entropy, of which the mean over all tokens is taken, from its log-probability under
    the weights being trained, under those before the first update by the trainer, and when it was sampled."""
    is_answer_BT, log_ratio_BT = rows.is_answer_BT, now_BT - trainer_BT
    num_tokens_B1 = is_answer_BT.sum(1, keepdim=True)
    if objective.kind == "gspo":
        log_ratio_BT = (log_ratio_BT * is_answer_BT).sum(1, keepdim=True).div(num_tokens_B1).expand_as(now_BT)
    weights_BT = clipped_weights(log_ratio_BT, advantages_B, objective.clip_low, objective.clip_high)
    if objective.loss_mean == "answers":
        weights_BT = weights_BT * num_tokens_B1.float().mean() / num_tokens_B1
    return importance_weights(trainer_BT, rows.rollout_log_probabilities_BT, objective.importance_cap) * weights_BT


def lay_out(rollouts: Sequence[Rollout], device: torch.device) -> AnswerRows:
    """One row per rollout, prompt then answer."""
    width = max(len(rollout.prompt_ids) + len(rollout.answer_ids) for rollout in rollouts) - 1
    token_ids_BT = torch.zeros(len(rollouts), width, dtype=torch.int64)
    target_ids_BT = torch.full((len(rollouts), width), IGNORED)
    log_probabilities_BT = torch.zeros(len(rollouts), width)
    for row, rollout in enumerate(rollouts):
        sequence = torch.tensor([*rollout.prompt_ids, *rollout.answer_ids])
        answer = slice(len(rollout.prompt_ids) - 1, len(sequence) - 1)
        token_ids_BT[row, : len(sequence) - 1] = sequence[:-1]
        target_ids_BT[row, answer] = sequence[len(rollout.prompt_ids) :]
        log_probabilities_BT[row, answer] = torch.tensor(rollout.log_probabilities)
    return AnswerRows(token_ids_BT.to(device), target_ids_BT.to(device), log_probabilities_BT.to(device))


@torch.no_grad()
def target_log_probabilities(model: Glm4Moe, rows: AnswerRows, temperature: float, num_sequences: int) -> Tensor:
    """log p(target) under the weights about to be trained, (B, T), at the temperature of the sampling."""
    pieces = []
    for tokens, targets in zip(
        rows.token_ids_BT.split(num_sequences), rows.target_ids_BT.split(num_sequences), strict=True
    ):
        pieces.append(model.lm_head.log_probabilities(model.hidden_states(tokens) / temperature, targets))
    return torch.cat(pieces)


def policy_updates(
    log_probabilities: Callable[[AnswerRows], Tensor],
    rollouts: Sequence[Rollout],
    objective: PolicyObjective,
    num_sequences: int,
    device: torch.device,
) -> tuple[list[Callable[[], list[MicroBatch]]], dict[str, float]]:
    """What makes the micro-batches of each update of a step, none where no group has two different rewards, and the
    step's metrics.

    `log_probabilities` gives those of the targets under the present weights. An update's micro-batches are made when
    the one before it was taken, and the metrics then count it too. A group of equal rewards has no gradient: its
    answers are left out, so they cost no pass and count in no mean."""
    rewards_GS = torch.tensor([rollout.reward.total for rollout in rollouts], device=device).view(
        -1, objective.samples_per_prompt
    )
    is_informative_G = (rewards_GS != rewards_GS[:, :1]).any(1)
    metrics = {
        "reward_mean": float(rewards_GS.mean()),
        "reward_std": float(rewards_GS.std(correction=0)),
        **reward_metrics([rollout.reward for rollout in rollouts]),
        "informative_groups": float(is_informative_G.sum()),
        "answer_tokens": sum(len(rollout.answer_ids) for rollout in rollouts) / len(rollouts),
        **dict.fromkeys(MISMATCH_METRICS, 0.0),
    }
    is_trained = is_informative_G.repeat_interleave(objective.samples_per_prompt).tolist()
    trained = [rollout for rollout, is_in in zip(rollouts, is_trained, strict=True) if is_in]
    if not trained:
        return [], metrics
    rows = lay_out(trained, device)
    trainer_BT = log_probabilities(rows)
    metrics |= _mismatch(trainer_BT, rows, objective)
    advantages_B = group_advantages(rewards_GS[is_informative_G]).flatten()
    groups = torch.arange(len(trained), device=device).view(-1, objective.samples_per_prompt)
    parts = [part.flatten() for part in groups.tensor_split(min(objective.updates_per_rollout, len(groups)))]
    shares = [len(part) / len(trained) for part in parts]

    def micro_batches(number: int) -> list[MicroBatch]:
        part = parts[number]
        own = AnswerRows(
            *(column[part] for column in (rows.token_ids_BT, rows.target_ids_BT, rows.rollout_log_probabilities_BT))
        )
        now_BT = log_probabilities(own) if number else trainer_BT[part]
        weights_BT = surrogate_weights(now_BT, trainer_BT[part], own, advantages_B[part], objective)
        is_weighted_BT = own.is_answer_BT & (advantages_B[part] != 0)[:, None]
        metrics["clip_fraction"] += shares[number] * float((weights_BT[is_weighted_BT] == 0).float().mean())
        return _micro_batches(own, weights_BT, objective.temperature, num_sequences)

    return [partial(micro_batches, number) for number in range(len(parts))], metrics


def _micro_batches(rows: AnswerRows, weights_BT: Tensor, temperature: float, num_sequences: int) -> list[MicroBatch]:
    columns = zip(
        *(column.split(num_sequences) for column in (rows.token_ids_BT, rows.target_ids_BT, weights_BT)), strict=True
    )
    return [
        MicroBatch(
            tokens, targets, torch.zeros_like(tokens), is_segmented=False, weights_BT=weights, temperature=temperature
        )
        for tokens, targets, weights in columns
    ]


def _mismatch(trainer_BT: Tensor, rows: AnswerRows, objective: PolicyObjective) -> dict[str, float]:
    """How far sampling and training disagree about the sampled tokens: MISMATCH_METRICS but the clip's."""
    log_ratio_A = (trainer_BT - rows.rollout_log_probabilities_BT)[rows.is_answer_BT]
    values = (
        log_ratio_A.abs().mean(),
        (log_ratio_A.expm1() - log_ratio_A).mean(),
        (log_ratio_A.exp() > objective.importance_cap).float().mean(),
    )
    return dict(zip(MISMATCH_METRICS, torch.stack(values).tolist(), strict=False))
