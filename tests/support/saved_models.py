"""Models as checkpoint directories and back, for tests that need a checkpoint which no phase has trained."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes, stacked_name, to_checkpoint_tensors
from model.formats.hf_checkpoint import config_dict, write_checkpoint


def save_checkpoint(
    model: Glm4Moe,
    checkpoint_dir: Path,
    *,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> list[str]:
    """Write the model as a checkpoint directory and return the file names; config.json carries the model's own
    rope_theta."""
    recipe = model.recipe.model_copy(update={"rope_theta": model.rope_theta})
    ends = {"eos_token_ids": eos_token_ids, "pad_token_id": pad_token_id}
    config = config_dict(recipe, dtype=dtype, is_scored=model.is_scored, **ends)
    tensors, shapes = to_checkpoint_tensors(model.state_dict()), checkpoint_shapes(model)
    return write_checkpoint(
        tensors.__getitem__, shapes, config, checkpoint_dir, dtype=dtype, max_shard_bytes=max_shard_bytes
    )


def from_checkpoint_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state under our names of tensors under checkpoint names; experts are stacked."""
    state: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for checkpoint_name, tensor in tensors.items():
        name, expert = stacked_name(checkpoint_name)
        if expert is None:
            state[name] = tensor
        else:
            stacks.setdefault(name, {})[expert] = tensor
    return state | {
        name: torch.stack([experts[expert] for expert in range(len(experts))]) for name, experts in stacks.items()
    }
