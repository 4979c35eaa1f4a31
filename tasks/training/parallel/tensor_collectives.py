"""Collectives of tensor parallelism as autograd functions, each with its conjugate as backward pass.

Between blocks every tensor rank holds a slice of the positions of the same rows: T positions are in slices of ceil(T
/ ranks), the last one shorter. Every rank computes the same loss and starts its backward pass from 1: a gradient that
is "partial" is summed over the ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tasks.training.parallel.ranks import Axis


def gather_positions(slice_BTD: Tensor, num_positions: int, axis: Axis) -> Tensor:
    """All positions from every rank's slice; the gradient, partial on each rank, is summed and cut back into slices."""
    return _GatherPositions.apply(slice_BTD, num_positions, axis)


def sum_to_slices(partial_BTD: Tensor, axis: Axis) -> Tensor:
    """This rank's slice of the sum of all ranks' tensors; the gradient is gathered."""
    return _SumToSlices.apply(partial_BTD, axis)


def features_to_positions(features_BTD: Tensor, axis: Axis) -> Tensor:
    """From this rank's features of all positions to all features of its slice; the gradient goes the other way."""
    return _FeaturesToPositions.apply(features_BTD, axis)


def sum_values(values: Tensor, axis: Axis) -> Tensor:
    """Sum over ranks of what each computed from its own positions. The gradient passes through: each rank's share of
    the sum is its own."""
    return _SumValues.apply(values, axis)


def cut_slice(whole_BTD: Tensor, axis: Axis) -> Tensor:
    """This rank's slice of what every rank holds, (B, T, ...). The gradient of each rank is only that of its slice: sum
    it."""
    size = slice_size(whole_BTD.shape[1], axis)
    return whole_BTD[:, axis.rank * size : (axis.rank + 1) * size]


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, slice_BTD: Tensor, num_positions: int, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather(slice_BTD, num_positions, axis)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sum_and_cut(grads[0], ctx.axis), None, None


class _SumToSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial_BTD: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.num_positions = axis, partial_BTD.shape[1]
        return _sum_and_cut(partial_BTD, axis)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.num_positions, ctx.axis), None


class _FeaturesToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features_BTD: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.num_positions = axis, features_BTD.shape[1]
        received_RBTD = _exchange(_cut(features_BTD, axis), axis)
        merged_BTD = received_RBTD.permute(1, 2, 0, 3).flatten(2)
        return merged_BTD[:, : _own_size(ctx.num_positions, axis)].contiguous()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        axis, num_positions = ctx.axis, ctx.num_positions
        grad_BTD = _pad(grads[0], slice_size(num_positions, axis))
        by_rank_RBTD = grad_BTD.unflatten(2, (axis.size, -1)).permute(2, 0, 1, 3).contiguous()
        return _join(_exchange(by_rank_RBTD, axis), num_positions), None


class _SumValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, axis: Axis) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def slice_size(num_positions: int, axis: Axis) -> int:
    """Positions in every slice but the last ones, which may be shorter."""
    return -(-num_positions // axis.size)


def _own_size(num_positions: int, axis: Axis) -> int:
    size = slice_size(num_positions, axis)
    return max(0, min(size, num_positions - axis.rank * size))


def _gather(slice_BTD: Tensor, num_positions: int, axis: Axis) -> Tensor:
    padded_BTD = _pad(slice_BTD, slice_size(num_positions, axis)).contiguous()
    gathered_RBTD = padded_BTD.new_empty(axis.size, *padded_BTD.shape)
    dist.all_gather_single(gathered_RBTD.flatten(0, 1), padded_BTD, group=axis.group)
    return _join(gathered_RBTD, num_positions)


def _sum_and_cut(partial_BTD: Tensor, axis: Axis) -> Tensor:
    slices_RBTD = _cut(partial_BTD, axis)
    own_BTD = torch.empty_like(slices_RBTD[0])
    dist.reduce_scatter_single(own_BTD, slices_RBTD.flatten(0, 1), group=axis.group)
    return own_BTD[:, : _own_size(partial_BTD.shape[1], axis)].contiguous()


def _exchange(to_ranks: Tensor, axis: Axis) -> Tensor:
    """Element r of the first dimension goes to rank r; the result is in the order of the ranks that sent it."""
    received = torch.empty_like(to_ranks)
    dist.all_to_all_single(received, to_ranks, group=axis.group)
    return received


def _cut(whole_BTD: Tensor, axis: Axis) -> Tensor:
    """Slices of positions, one per rank, all of one size, (R, B, T / R, D)."""
    padded_BTD = _pad(whole_BTD, slice_size(whole_BTD.shape[1], axis) * axis.size)
    return padded_BTD.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()


def _join(slices_RBTD: Tensor, num_positions: int) -> Tensor:
    return slices_RBTD.transpose(0, 1).flatten(1, 2)[:, :num_positions].contiguous()


def _pad(hidden_BTD: Tensor, num_positions: int) -> Tensor:
    missing = num_positions - hidden_BTD.shape[1]
    return F.pad(hidden_BTD, (0, 0, 0, missing)) if missing else hidden_BTD
