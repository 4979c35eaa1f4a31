"""Sums gradients over the tensor axis, computes their norm, and clips by it: between backward pass and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.training.parallel.partitions import Piece, gradient_pieces, pieces_of
from tasks.training.parallel.ranks import Ranks
from tasks.training.parallel.shards import axis_of, shard_of

if TYPE_CHECKING:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine

CLIP_EPS = 1e-6
"""torch's."""


def sum_in_float32(engine: DeepSpeedEngine, add: Callable[[Tensor, Tensor], object]) -> None:
    """Add each bfloat16 gradient to its float32 sum as soon as it is there, and let it go. `add` adds its second
    argument to its first.

    DeepSpeed's `immediate_grad_update` does the same by way of a float32 copy: on an H200 that takes 1.6 times as long.
    """
    optimizer = cast("BF16_Optimizer", engine.optimizer)
    for group, parameters in enumerate(optimizer.bf16_groups):
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(_add_gradient, optimizer, add, group, index))


def leave_out_own_norm(engine: DeepSpeedEngine) -> None:
    """Let DeepSpeed's step with bfloat16 weights compute no norm of its gradients: `gradient_norm` did before it, and a
    step whose norm is not finite was refused. DeepSpeed's counts what tensor ranks share on the first of them only,
    and fails where another rank is left without a gradient."""
    optimizer = cast("BF16_Optimizer", engine.optimizer)
    nothing = torch.zeros((), device=engine.device)
    optimizer.get_grads_for_norm = lambda for_clipping=False: ([nothing], {})


def _add_gradient(
    optimizer: BF16_Optimizer, add: Callable[[Tensor, Tensor], object], group: int, index: int, parameter: Tensor
) -> None:
    assert parameter.grad is not None
    total = optimizer.fp32_groups_gradients[group][index]
    add(total, parameter.grad.view_as(total))
    optimizer.fp32_groups_has_gradients[group][index] = True
    parameter.grad = None


@torch.no_grad()
def reduce_partial(engine: DeepSpeedEngine, model: nn.Module, ranks: Ranks) -> None:
    """Sum gradients of parameters that saw only a slice of the sequence (`parameter.is_partial_over_tensor`) over the
    tensor axis."""
    if ranks.tensor.size == 1:
        return
    for piece, gradient in gradient_pieces(engine, pieces_of(engine, model, ranks)):
        if getattr(piece.parameter, "is_partial_over_tensor", False):
            total = gradient.to(engine.device)
            dist.all_reduce(total, group=ranks.tensor.group)
            gradient.copy_(total)


@torch.no_grad()
def gradient_norm(engine: DeepSpeedEngine, model: nn.Module, ranks: Ranks) -> Tensor:
    """Norm of all gradients of the whole model, after the mean over ranks and before the optimizer; a float64 scalar,
    not read on the host.

    DeepSpeed's own norm is computed inside its step, and there is none without ZeRO.
    """
    stage = engine.zero_optimization_stage()
    weighted: dict[int, list[Tensor]] = {}
    for piece, gradient in gradient_pieces(engine, pieces_of(engine, model, ranks)):
        weighted.setdefault(_num_holders(piece, stage, ranks), []).append(gradient)
    squares = torch.zeros((), dtype=torch.float64, device=engine.device)
    for num_holders, gradients in weighted.items():
        squares += torch.nn.utils.get_total_norm(gradients).to(squares).square() / num_holders
    for axis in (ranks.stage, ranks.pipeline):
        if axis.group is not None:
            dist.all_reduce(squares, group=axis.group)
    return squares.sqrt()


@torch.no_grad()
def clip_gradients(engine: DeepSpeedEngine, model: nn.Module, ranks: Ranks, norm: float, max_norm: float) -> None:
    """Scale the gradients whose norm this is down to `max_norm`, 0 for none, as torch.nn.utils.clip_grad_norm_ does.
    Every topology clips in this one way, by the norm of the whole model. DeepSpeed's own clipping stays off: its norm
    is of one stage of a pipeline."""
    factor = max_norm / (norm + CLIP_EPS)
    if max_norm == 0 or factor >= 1:
        return
    for _, gradient in gradient_pieces(engine, pieces_of(engine, model, ranks)):
        gradient.mul_(factor)


def _num_holders(piece: Piece, stage: int, ranks: Ranks) -> int:
    """How many ranks of the pipeline stage hold the same elements of a gradient."""
    shard = shard_of(piece.parameter)
    num_copies = ranks.stage.size // (1 if shard is None else axis_of(shard, ranks).size)
    if stage == 0:
        return num_copies
    return num_copies // (ranks.expert_data if shard is not None and shard.axis == "expert" else ranks.replicas).size
