"""What is done with gradients between the backward pass and the optimizer: sums over the tensor axis, and their norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.training.ranks import Ranks
from tasks.training.shards import axis_of, shard_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@torch.no_grad()
def reduce_partial(model: nn.Module, ranks: Ranks) -> None:
    """Sum gradients of parameters that saw only a slice of the sequence (`parameter.is_partial_over_tensor`) over the tensor axis."""
    if ranks.tensor.group is None:
        return
    for parameter in model.parameters():
        if getattr(parameter, "is_partial_over_tensor", False) and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=ranks.tensor.group)


@torch.no_grad()
def gradient_norm(engine: DeepSpeedEngine, model: nn.Module, ranks: Ranks) -> float:
    """Of all gradients of the whole model, after the mean over ranks and before the optimizer.

    DeepSpeed's own norm is that of the orthogonalised updates under Muon, and nothing without ZeRO.
    """
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.grad is not None:
            squares += _own_share(parameter, ranks) * float(parameter.grad.double().square().sum())
    for axis in (ranks.stage, ranks.pipeline):
        if axis.group is not None:
            dist.all_reduce(squares, group=axis.group)
    return float(squares.sqrt())


def _own_share(parameter: Tensor, ranks: Ranks) -> float:
    """How much of the square is this rank's to count, so that the sum over the stage counts every element once."""
    shard = shard_of(parameter)
    return (1 if shard is None else axis_of(shard, ranks).size) / ranks.stage.size
