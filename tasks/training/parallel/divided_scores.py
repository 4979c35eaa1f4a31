"""The scalar head of a reward model or critic whose rows' positions are divided among context and tensor ranks.

The rank that holds a row's last token scores the row, and all ranks of the row get the score. Values of all positions
go to the tensor ranks, which have the targets of the same positions. The head is whole on each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from model.architecture.preferences import ScoreHead
from model.architecture.transformer import Glm4Moe
from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.tensor_collectives import sum_values


def divide_scores(model: Glm4Moe, ranks: Ranks) -> None:
    """Make a reward model score rows whose positions are divided; nothing where a rank has whole rows. The weight stays
    the same parameter."""
    if model.is_scored and ranks.context.size * ranks.tensor.size > 1:
        model.score = DividedScoreHead(model.score.weight, ranks.context, ranks.tensor)


class DividedScoreHead(ScoreHead):
    """Turns hidden states of this rank's equal slice of the positions into scores."""

    def __init__(self, weight: nn.Parameter, context: Axis, tensor: Axis) -> None:
        super().__init__(weight.shape[1])
        self.weight = weight
        self.context, self.tensor = context, tensor

    def forward(self, hidden_BTD: Tensor, last_B: Tensor) -> Tensor:
        """Of whole rows, the same on every rank. The gradient is that of the rows whose last token is in this slice:
        among tensor ranks it is the whole one, among context ranks its mean is a part of it (`mean_over_parts`)."""
        size = hidden_BTD.shape[1]
        own_B = last_B - size * (self.context.rank * self.tensor.size + self.tensor.rank)
        is_own_B = (own_B >= 0) & (own_B < size)
        scores_B = super().forward(hidden_BTD, own_B.clamp(0, size - 1))
        scores_B = torch.where(is_own_B, scores_B, 0.0)
        for axis in (self.tensor, self.context):
            if axis.size > 1:
                scores_B = sum_values(scores_B, axis)
        return scores_B

    def values(self, hidden_BTD: Tensor) -> Tensor:
        """At the positions of this context rank, the same on its tensor ranks. The gradient is that of this slice."""
        own_BT = super().values(hidden_BTD)
        if self.tensor.size == 1:
            return own_BT
        size = own_BT.shape[1]
        before = self.tensor.rank * size
        return sum_values(pad(own_BT, (before, (self.tensor.size - 1) * size - before)), self.tensor)
