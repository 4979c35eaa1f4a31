"""Draws random initial weights, tensor by tensor, from the seed and the tensor's checkpoint name.

Each tensor depends only on these two. So ranks draw only what they hold, and every topology starts from the same
model.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from configs.schema import ModelRecipe
from model.formats.checkpoint_names import checkpoint_names
from model.formats.hf_checkpoint import ROUTER_BIAS


class InitialWeights:
    """Matrices and embeddings from N(0, initializer_range), norms 1, biases and router biases 0: as
    `Glm4Moe.init_weights`."""

    def __init__(self, recipe: ModelRecipe, model_of_all: nn.Module, seed: int) -> None:
        """`model_of_all` is an undivided model, on the meta device: its names are those of the checkpoint."""
        self.recipe, self.seed = recipe, seed
        self.all_names = {
            each for name in model_of_all.state_dict() for each in checkpoint_names(name, recipe.n_routed_experts)
        }

    def names(self) -> set[str]:
        return self.all_names

    def read(self, name: str, shape: torch.Size) -> Tensor:
        if name.endswith(ROUTER_BIAS):
            return torch.zeros(shape)
        if len(shape) > 1:
            number = int.from_bytes(hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:8], "big") >> 1
            generator = torch.Generator().manual_seed(number)
            return torch.empty(shape).normal_(0.0, self.recipe.initializer_range, generator=generator)
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
