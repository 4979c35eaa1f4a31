"""Where a rank's weights come from, under checkpoint names: a state directory, a Hugging Face one, or fresh adapters.
A reward model takes its trunk from a language model, and a fresh scalar head.

Fresh adapters follow PEFT: A uniform within 1 / sqrt(inputs), B zero, magnitudes the norms of the matrix's rows. Each
tensor depends on the seed and its name only, so every topology starts from the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from configs.schema import ModelRecipe
from model.architecture.adapters import LORA_B, MAGNITUDE
from model.architecture.four_bit import FourBitMatrices
from model.formats.hf_checkpoint import CheckpointTensors
from model.formats.weight_files import open_safetensors

SCORE = "score.weight"


class TensorSource(Protocol):
    """Where whole tensors come from, under checkpoint names."""

    def names(self) -> set[str]: ...

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """Raises ValueError where the shape is another one."""
        ...


class StateFiles:
    """One kind of tensor of a state directory, read one at a time."""

    def __init__(self, state_dir: Path, kind: str) -> None:
        self.state_dir = state_dir
        self.paths: dict[str, Path] = {}
        for path in sorted(state_dir.glob(f"{kind}-*.safetensors")):
            with open_safetensors(path) as file:
                self.paths.update(dict.fromkeys(file.keys(), path))

    def names(self) -> set[str]:
        return set(self.paths)

    def tensor(self, name: str) -> Tensor:
        """A copy in memory of its own: an open file keeps resident whatever was read of it."""
        with open_safetensors(self.paths[name]) as file:
            return file.get_tensor(name).clone()

    def read(self, name: str, shape: torch.Size) -> Tensor:
        tensor = self.tensor(name)
        if tensor.shape != shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} in {self.state_dir}, {tuple(shape)} in the model: use one "
                f"architecture"
            )
        return tensor


def open_weights(state_dir: Path, weights_dir: Path, recipe: ModelRecipe) -> TensorSource:
    """The weights of a hand-over state: its masters, or where it has none (a phase that trained an adapter) those of
    the Hugging Face directory."""
    masters = StateFiles(state_dir, "master")
    return masters if masters.names() else CheckpointTensors(weights_dir, recipe)


class FourBitWeights:
    """Weights of which some matrices are rounded to 4 bits and made whole again, float32: what qlora computes with."""

    def __init__(self, weights: TensorSource, in_four_bits: Collection[str]) -> None:
        self.weights, self.in_four_bits = weights, in_four_bits

    def names(self) -> set[str]:
        return self.weights.names()

    def read(self, name: str, shape: torch.Size) -> Tensor:
        weight = self.weights.read(name, shape)
        if name not in self.in_four_bits:
            return weight
        held = FourBitMatrices(torch.Size((1, *shape)), weight.device)
        held.put(0, weight)
        return held.whole(0, torch.float32)


class FreshAdapters:
    """The tensors with which adapters begin."""

    def __init__(self, shapes: dict[str, torch.Size], weights: TensorSource, seed: int) -> None:
        """`shapes` are those of all tensors of the adapted model under checkpoint names; `weights` its frozen ones."""
        self.shapes, self.weights, self.seed = shapes, weights, seed

    def names(self) -> set[str]:
        return set(self.shapes) - self.weights.names()

    def read(self, name: str, shape: torch.Size) -> Tensor:
        if name.endswith(LORA_B):
            return torch.zeros(shape)
        if name.endswith(MAGNITUDE):
            matrix = name.removesuffix(MAGNITUDE) + "weight"
            return torch.linalg.vector_norm(self.weights.read(matrix, self.shapes[matrix]), dim=1, dtype=torch.float32)
        bound = shape[-1] ** -0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator_of(self.seed, name))


class RewardModelStart:
    """The trunk of a language model with a scalar head from N(0, initializer_range); its unembedding and MTP layer are
    left out."""

    def __init__(self, shapes: dict[str, torch.Size], weights: TensorSource, recipe: ModelRecipe, seed: int) -> None:
        """`shapes` are those of the reward model's tensors under checkpoint names."""
        self.shapes, self.weights, self.recipe, self.seed = shapes, weights, recipe, seed

    def names(self) -> set[str]:
        return set(self.shapes) & (self.weights.names() | {SCORE})

    def read(self, name: str, shape: torch.Size) -> Tensor:
        if name != SCORE:
            return self.weights.read(name, shape)
        return torch.empty(shape).normal_(0.0, self.recipe.initializer_range, generator=generator_of(self.seed, name))


def generator_of(seed: int, name: str) -> torch.Generator:
    """The generator of one tensor: what is drawn for it depends on nothing else."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1
    return torch.Generator().manual_seed(number)
