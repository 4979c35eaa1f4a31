"""The value loss of a critic: a scalar head says at each position what the answer is worth from its next token on."""

from typing import NamedTuple, Self

from torch import Tensor

from model.architecture.losses import IGNORED
from model.architecture.preferences import ScoreHead


class ValueTargets(NamedTuple):
    """What the values of a batch are trained towards, each (B, T)."""

    returns_BT: Tensor
    """What the rest of the answer was worth."""
    values_BT: Tensor
    """The critic's values before the first update on these answers."""
    clip: float
    """How far a value may move from those, and still lower the loss."""

    def at(self, positions: slice) -> Self:
        """Those of some positions of all rows."""
        return self._replace(returns_BT=self.returns_BT[:, positions], values_BT=self.values_BT[:, positions])


def clipped_value_loss(head: ScoreHead, hidden_BTD: Tensor, target_ids_BT: Tensor, values: ValueTargets) -> Tensor:
    """Mean over the kept targets of max((v - return)^2, (v clipped to v before +- clip - return)^2) / 2, float32; 0
    where none is kept (as in OpenAI's baselines, ppo2)."""
    now_BT = head.values(hidden_BTD)
    near_BT = values.values_BT + (now_BT - values.values_BT).clamp(-values.clip, values.clip)
    errors_BT = (now_BT - values.returns_BT).square().maximum((near_BT - values.returns_BT).square())
    is_kept_BT = target_ids_BT != IGNORED
    return 0.5 * (errors_BT * is_kept_BT).sum() / is_kept_BT.sum().clamp(min=1)
