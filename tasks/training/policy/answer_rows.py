"""Sampled answers as rows: prompt then answer, and how likely a model finds each token of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model.architecture.losses import IGNORED
from tasks.training.parallel.micro_batch import MicroBatch

if TYPE_CHECKING:
    from model.architecture.transformer import Glm4Moe
    from tasks.training.policy.rollouts import Rollout


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

    def select(self, numbers: Tensor | slice) -> AnswerRows:
        """The rows with these numbers."""
        return AnswerRows(
            self.token_ids_BT[numbers], self.target_ids_BT[numbers], self.rollout_log_probabilities_BT[numbers]
        )

    def micro_batch(self, *, is_filler: bool, **settings: Any) -> MicroBatch:
        """These rows as a micro-batch with further `settings` of it; a filler has no targets."""
        targets_BT = torch.full_like(self.target_ids_BT, IGNORED) if is_filler else self.target_ids_BT
        return MicroBatch(
            self.token_ids_BT,
            targets_BT,
            torch.zeros_like(self.token_ids_BT),
            is_segmented=False,
            is_filler=is_filler,
            **settings,
        )


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
