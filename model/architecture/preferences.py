"""Losses of preference pairs: of a scalar head (Bradley-Terry), and of a policy against its reference (DPO).

Rows 2p and 2p + 1 of a batch are pair p: the preferred answer, then the rejected one. The loss of a pair is
-log sigmoid(margin). The margin is that of two scores, or beta times how much more than the reference the policy
prefers the first answer (arXiv 2305.18290, equation 7).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from model.architecture.float32_products import linear_in_float32
from model.architecture.losses import IGNORED, LanguageHead


class Preference(NamedTuple):
    """What makes the rows of a batch pairs."""

    last_B: Tensor
    """Position of each row's last token: its hidden state is scored."""
    reference_B: Tensor
    """Log-probability of each row's targets under the reference model; a scalar head reads none of it."""
    beta: float
    """Weight of the log-ratios in the margin; a scalar head's margin is that of its scores."""


def pair_margins(values_B: Tensor) -> Tensor:
    """By how much each pair's preferred row is above its rejected one, (P,)."""
    return values_B[0::2] - values_B[1::2]


class ScoreHead(nn.Module):
    """The scalar head of a reward model or a critic; transformers' sequence classification calls it `score` too."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size))

    def forward(self, hidden_BTD: Tensor, last_B: Tensor) -> Tensor:
        """The score of each row, float32 (B,), from the hidden state of its last token."""
        last_BD = hidden_BTD[torch.arange(len(last_B), device=last_B.device), last_B]
        return linear_in_float32(last_BD, self.weight).squeeze(1)

    def values(self, hidden_BTD: Tensor) -> Tensor:
        """The score at every position, float32 (B, T)."""
        return linear_in_float32(hidden_BTD.flatten(0, 1), self.weight).view(hidden_BTD.shape[:2])


def scored_preference_loss(head: ScoreHead, hidden_BTD: Tensor, preference: Preference) -> Tensor:
    """Mean of -log sigmoid(score of the preferred - score of the rejected) over the pairs."""
    return softplus(-pair_margins(head(hidden_BTD, preference.last_B))).mean()


def direct_preference_loss(
    head: LanguageHead,
    hidden_BTD: Tensor,
    target_ids_BT: Tensor,
    preference: Preference,
    sum_over_parts: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Mean DPO loss over the pairs. Its gradient is that of cross-entropy whose targets weigh beta x sigmoid(-margin),
    negative for the rejected answer: so it goes through the fused cross-entropy, and no logits are kept. Where ranks
    hold parts of the rows, `sum_over_parts` adds up what each computed, and the gradient is that of the own part."""
    own_B = head(hidden_BTD.detach(), target_ids_BT, scores_targets=True).sum(1)
    log_ratios_B = (own_B if sum_over_parts is None else sum_over_parts(own_B)) - preference.reference_B
    margins_P = preference.beta * pair_margins(log_ratios_B)
    weights_P = preference.beta * torch.sigmoid(-margins_P)
    weights_B = torch.stack((weights_P, -weights_P), 1).flatten()
    num_targets = (target_ids_BT != IGNORED).sum().clamp(min=1)
    mean = head(hidden_BTD, target_ids_BT, weights_B[:, None].expand(target_ids_BT.shape))
    surrogate = mean * num_targets / len(margins_P)
    return softplus(-margins_P).mean() + surrogate - surrogate.detach()


def mean_over_parts(loss: Tensor, num_parts: int) -> Tensor:
    """A loss of whole rows that every rank with a part of them has, whose gradient is that of the rank's own part: the
    factor makes the mean over the parts the gradient of the whole."""
    return loss * num_parts - loss.detach() * (num_parts - 1)
