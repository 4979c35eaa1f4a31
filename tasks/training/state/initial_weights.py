"""Draws random initial weights, tensor by tensor, from the seed and the tensor's checkpoint name.

Each tensor depends only on these two. So ranks draw only what they hold, and every topology starts from the same
model.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from configs.schema import ModelRecipe
from model.formats.hf_checkpoint import ROUTER_BIAS
from tasks.training.state.tensor_sources import generator_of


class InitialWeights:
    """Matrices and embeddings from N(0, initializer_range), norms 1, biases and router biases 0: as
    `Glm4Moe.init_weights`."""

    def __init__(self, recipe: ModelRecipe, names: Collection[str], seed: int) -> None:
        """`names` are those of all tensors of the checkpoint."""
        self.recipe, self.seed = recipe, seed
        self.all_names = set(names)

    def names(self) -> set[str]:
        return self.all_names

    def read(self, name: str, shape: torch.Size) -> Tensor:
        if name.endswith(ROUTER_BIAS):
            return torch.zeros(shape)
        if len(shape) > 1:
            generator = generator_of(self.seed, name)
            return torch.empty(shape).normal_(0.0, self.recipe.initializer_range, generator=generator)
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
