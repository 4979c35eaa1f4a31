"""What a critic makes of sampled answers: an advantage for each token, and the values that it learns from them.

The reward of an answer comes with its last token. Every token also pays for leaving the reference:
kl_coefficient x (log p policy - log p reference), as in InstructGPT (arXiv 2203.02155). Generalized advantage
estimation (arXiv 1506.02438) makes advantages and returns of both and of the critic's values. An answer that was cut
off counts as ended: nothing comes after its last token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.architecture.values import ValueTargets
from tasks.training.policy.rank_shares import share_batches

if TYPE_CHECKING:
    from configs.schema import PpoObjective
    from model.architecture.transformer import Glm4Moe
    from tasks.training.parallel.micro_batch import MicroBatch
    from tasks.training.parallel.ranks import Axis
    from tasks.training.policy.answer_rows import AnswerRows

NORMALIZATION_EPS = 1e-8


@dataclass(frozen=True)
class Estimates:
    """Of a step's answers, each (B, T) and 0 outside them."""

    advantages_BT: Tensor
    """With mean 0 and standard deviation 1 over the answers' tokens."""
    returns_BT: Tensor
    values_BT: Tensor
    metrics: dict[str, float]


def estimate_advantages(
    rows: AnswerRows,
    rewards_B: Tensor,
    values_BT: Tensor,
    trainer_BT: Tensor,
    reference_BT: Tensor,
    objective: PpoObjective,
) -> Estimates:
    """From the answers' rewards, the critic's values at every position, and the log-probabilities of the targets under
    the weights before the step and under the reference."""
    is_answer_BT = rows.is_answer_BT
    values_BT = values_BT * is_answer_BT
    log_ratio_BT = (trainer_BT - reference_BT) * is_answer_BT
    paid_BT = token_rewards(rewards_B, log_ratio_BT, is_answer_BT, objective.kl_coefficient)
    advantages_BT = generalized_advantages(paid_BT, values_BT, is_answer_BT, objective.discount, objective.gae_lambda)
    returns_BT = (advantages_BT + values_BT) * is_answer_BT
    metrics = {
        "reference_kl": float((torch.expm1(-log_ratio_BT) + log_ratio_BT)[is_answer_BT].mean()),
        "explained_variance": explained_variance(returns_BT[is_answer_BT], values_BT[is_answer_BT]),
    }
    return Estimates(normalized(advantages_BT, is_answer_BT), returns_BT, values_BT, metrics)


def token_rewards(rewards_B: Tensor, log_ratio_BT: Tensor, is_answer_BT: Tensor, kl_coefficient: float) -> Tensor:
    """(B, T): the answer's reward at its last token, less at each of its tokens kl_coefficient x log ratio."""
    positions_T = torch.arange(is_answer_BT.shape[1], device=is_answer_BT.device)
    last_B1 = (is_answer_BT * positions_T).amax(1, keepdim=True)
    return rewards_B[:, None] * (positions_T == last_B1) - kl_coefficient * log_ratio_BT * is_answer_BT


def generalized_advantages(
    rewards_BT: Tensor, values_BT: Tensor, is_answer_BT: Tensor, discount: float, gae_lambda: float
) -> Tensor:
    """A_t = d_t + discount x lambda x A_t+1 with d_t = r_t + discount x V_t+1 - V_t, where V and A after an answer's
    last token are 0; 0 outside answers. t counts the tokens that were sampled: between two turns the tokens of a tool's
    answer are passed over."""
    advantages_BT = torch.zeros_like(values_BT)
    following_B, value_B = values_BT.new_zeros(len(values_BT)), values_BT.new_zeros(len(values_BT))
    for position in reversed(range(values_BT.shape[1])):
        is_in_B = is_answer_BT[:, position]
        error_B = rewards_BT[:, position] + discount * value_B - values_BT[:, position]
        following_B = torch.where(is_in_B, error_B + discount * gae_lambda * following_B, following_B)
        value_B = torch.where(is_in_B, values_BT[:, position], value_B)
        advantages_BT[:, position] = following_B * is_in_B
    return advantages_BT


def normalized(advantages_BT: Tensor, is_answer_BT: Tensor) -> Tensor:
    """Shifted and scaled to mean 0 and standard deviation 1 over all tokens of the answers; 0 outside them, and
    everywhere where all are equal but for rounding."""
    own_A = advantages_BT[is_answer_BT]
    spread = own_A.std(correction=0)
    if spread <= _rounding(own_A, own_A.abs().max()):
        return torch.zeros_like(advantages_BT)
    return (advantages_BT - own_A.mean()) / (spread + NORMALIZATION_EPS) * is_answer_BT


def _rounding(values_A: Tensor, largest: Tensor) -> Tensor:
    """What sums of so many values near the largest may differ by."""
    return torch.finfo(values_A.dtype).eps * len(values_A) ** 0.5 * largest


def explained_variance(returns_A: Tensor, values_A: Tensor) -> float:
    """1 - var(returns - values) / var(returns): 1 where the values are the returns, 0 where they say no more than the
    mean, below that where they say less. 0 where all returns are equal but for rounding: each is a sum of values."""
    variance = returns_A.var(correction=0)
    largest = torch.maximum(returns_A.abs().max(), values_A.abs().max())
    rounding = _rounding(returns_A, largest)
    return float(1 - (returns_A - values_A).var(correction=0) / variance) if variance > rounding**2 else 0.0


@torch.no_grad()
def token_values(critic: Glm4Moe, rows: AnswerRows, num_sequences: int) -> Tensor:
    """The scalar head's value at every position, float32 (B, T): what the critic expects of the target there before it
    is written."""
    whole_BT = torch.zeros_like(rows.rollout_log_probabilities_BT)
    for numbers in rows.batches(torch.arange(len(whole_BT), device=whole_BT.device), num_sequences):
        own = rows.batch(numbers)
        hidden_BTD = critic.hidden_states(own.token_ids_BT, gaps_BT=own.gaps_BT)
        whole_BT[numbers, : own.width] = critic.score.values(hidden_BTD)
    return whole_BT


def critic_batches(
    rows: AnswerRows, estimates: Estimates, part: Tensor, value_clip: float, num_sequences: int, data: Axis
) -> list[MicroBatch]:
    """This rank's micro-batches of one update of the critic, on these of the answers."""
    batches = []
    for numbers, is_filler in share_batches(rows, part, num_sequences, data):
        own = replace(rows.batch(numbers), replays=False)
        returns_BT, values_BT = (each[numbers, : own.width] for each in (estimates.returns_BT, estimates.values_BT))
        batches.append(own.micro_batch(is_filler=is_filler, values=ValueTargets(returns_BT, values_BT, value_clip)))
    return batches
