"""Writes a trained adapter: its tensors in PEFT's format, and the weights with it merged in.

In: the tensors of the frozen weights and of the adapter. Out: adapter_model.safetensors (float32) and
adapter_config.json, which `peft` loads beside the weights that the phase started from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from configs.schema import AdapterRecipe
from model.architecture.adapters import ATTENTION_MATRICES, LORA_A, LORA_B, MAGNITUDE, MLP_MATRICES, merged_weight
from model.formats.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from tasks.training.state.saved_state import SavedTensors
from tasks.training.state.tensor_sources import StateFiles, TensorSource

BASE_FILE, WEIGHTS_KEY, KIND_KEY = "base.json", "weights_sha256", "kind"
"""Which weights the adapter was trained on, by weights_sha256, and its kind.

PEFT's configuration has no field for them, and safetensors writes several entries of its metadata in any order."""
PEFT_PREFIX = "base_model.model."
_PARAMETERS = {
    "dense_mlp": tuple(f"mlp.{name}.weight" for name in MLP_MATRICES),
    "shared_experts": tuple(f"shared_experts.{name}.weight" for name in MLP_MATRICES),
    "routed_experts": ("experts.gate_up_proj", "experts.down_proj"),
}
"""Names of PEFT's target_parameters. As target_modules their last names would all mean the routed experts, which
transformers stacks (PEFT 0.21.2, transformers_weight_conversion.py)."""
_FUSED = r".*\.gate_up_proj"
"""transformers fuses two matrices of an expert: PEFT makes one adapter of twice the rank of their two."""


class AdapterTensors(Protocol):
    """The tensors of an adapter, under checkpoint names."""

    def names(self) -> set[str]: ...

    def tensor(self, name: str) -> Tensor: ...


class MergedTensors:
    """The frozen weights with the adapter merged in, each computed when it is asked for."""

    def __init__(
        self, weights: TensorSource, shapes: Mapping[str, torch.Size], adapter: AdapterTensors, scaling: float
    ) -> None:
        self.weights, self.shapes, self.adapter, self.scaling = weights, shapes, adapter, scaling

    def beside(self, name: str) -> Tensor:
        """A tensor of the frozen weights, or of the adapter."""
        return self.weights.read(name, self.shapes[name]) if name in self.shapes else self.adapter.tensor(name)

    def names(self) -> set[str]:
        return self.weights.names()

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """As `tensor`, of the shape that it has."""
        assert shape == self.shapes[name], (name, shape)
        return self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        weight = self.weights.read(name, self.shapes[name])
        matrix = name.removesuffix("weight")
        if matrix + LORA_A not in self.adapter.names():
            return weight
        magnitude = self.adapter.tensor(matrix + MAGNITUDE) if matrix + MAGNITUDE in self.adapter.names() else None
        return merged_weight(
            weight, self.adapter.tensor(matrix + LORA_A), self.adapter.tensor(matrix + LORA_B), magnitude, self.scaling
        )


def write_adapter(
    adapter: SavedTensors | StateFiles, recipe: AdapterRecipe, weights_digest: str, adapter_dir: Path
) -> None:
    """Equal input, equal bytes. `weights_digest` is that of the frozen weights, by weights_sha256."""
    adapter_dir.mkdir(parents=True)
    tensors = {PEFT_PREFIX + name: adapter.tensor(name) for name in sorted(adapter.names())}
    save_file(tensors, adapter_dir / ADAPTER_FILE, metadata={"format": "pt"})
    base = {WEIGHTS_KEY: weights_digest, KIND_KEY: recipe.kind}
    (adapter_dir / BASE_FILE).write_text(json.dumps(base, indent=2) + "\n")
    (adapter_dir / ADAPTER_CONFIG).write_text(json.dumps(peft_config(recipe), indent=2) + "\n")


def peft_config(recipe: AdapterRecipe) -> dict[str, object]:
    """adapter_config.json's content; PEFT's defaults are left out. PEFT loads no dropout of target_parameters."""
    parameters = [name for target in recipe.targets for name in _PARAMETERS.get(target, ())]
    fused = {_FUSED: 2} if "routed_experts" in recipe.targets else {}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "rank_pattern": {name: factor * recipe.rank for name, factor in fused.items()},
        "alpha_pattern": {name: factor * recipe.alpha for name, factor in fused.items()},
        "lora_dropout": 0.0 if parameters else recipe.dropout,
        "bias": "none",
        "use_dora": recipe.kind == "dora",
        "target_modules": list(ATTENTION_MATRICES) if "attention" in recipe.targets else [],
        "target_parameters": parameters,
        "inference_mode": True,
    }
