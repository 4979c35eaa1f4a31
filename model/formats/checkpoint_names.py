"""Maps our parameter names to the checkpoint's: equal, but experts are stacked here and one tensor each on disk."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_proj|up_proj|down_proj)(?:_(lora_[AB]))?")
_PER_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def checkpoint_names(name: str, num_experts: int) -> list[str]:
    """The tensors on disk that hold one of our parameters or buffers: one, or one per expert in order."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return [name]
    matrix = match[2] if match[3] is None else f"{match[2]}.{match[3]}"
    return [f"{match[1]}.{expert}.{matrix}.weight" for expert in range(num_experts)]


def stacked_name(checkpoint_name: str) -> tuple[str, int | None]:
    """Our name for a tensor on disk and, for an expert's, its index in the stack."""
    match = _PER_EXPERT.fullmatch(checkpoint_name)
    return (checkpoint_name, None) if match is None else (f"{match[1]}.{match[3]}", int(match[2]))


def checkpoint_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shapes of all tensors of an undivided model under checkpoint names; it may be on the meta device."""
    return {name: tensor.shape for name, tensor in to_checkpoint_tensors(model.state_dict()).items()}


def to_checkpoint_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state under our names as a state under checkpoint names; experts become views, nothing is copied."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        names = checkpoint_names(name, tensor.shape[0] if tensor.dim() else 0)
        tensors.update(zip(names, [tensor] if names == [name] else tensor.unbind(0), strict=True))
    return tensors


def wrong_shape(name: str, held: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """What is wrong with a tensor of another shape, and what to do."""
    is_turned = held == wanted[::-1]
    fix = "it is transposed, export it again" if is_turned else "config.json belongs to another model, take its own"
    return f"tensor {name} has shape {held}, the model wants {wanted}: {fix}"
