"""A model of which each rank may hold a part, with DeepSpeed's engine around it: alone, or with its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from model.architecture.transformer import Glm4Moe
from model.optimizer.optimizer import Muon
from tasks.training.parallel.ranks import Ranks

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@dataclass(frozen=True)
class DividedModel:
    """A model as it was built and divided, and the engine around it."""

    engine: DeepSpeedEngine
    model: Glm4Moe
    ranks: Ranks

    @property
    def is_divided(self) -> bool:
        """Whether no rank can compute the model alone: ranks divide its weights, or the positions of its rows."""
        ranks = self.ranks
        axes = (ranks.tensor, ranks.context, ranks.pipeline, ranks.expert)
        return any(axis.size > 1 for axis in axes) or self.engine.zero_optimization_stage() == 3

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass(frozen=True)
class Trainable(DividedModel):
    """A model that is trained."""

    optimizer: Muon
    critic: Trainable | None = None
    """The critic of the policy that this is; None for other objectives than PPO."""
