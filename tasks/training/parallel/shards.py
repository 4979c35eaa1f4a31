"""Parameters that this rank holds only a part of: who holds the rest, and how a part becomes the whole and back.

Tensor and expert parallelism mark such parameters with `parameter.shard`. A parameter without the mark is whole on
every rank of its pipeline stage. Parts are equal slices along one dimension, in the order of the ranks on the axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.training.parallel.ranks import Axis, Ranks


@dataclass(frozen=True)
class Shard:
    """Which slice along `dim` this rank holds: that of its index on `axis`."""

    axis: Literal["tensor", "expert"]
    dim: int


def shard_of(parameter: Tensor) -> Shard | None:
    """None where the rank holds the whole parameter."""
    return getattr(parameter, "shard", None)


def axis_of(shard: Shard, ranks: Ranks) -> Axis:
    return ranks.tensor if shard.axis == "tensor" else ranks.expert


def whole_shape(parameter: Tensor, shape: torch.Size, ranks: Ranks) -> torch.Size:
    """The shape of the parameter in the checkpoint, from that of this rank's part."""
    shard = shard_of(parameter)
    if shard is None:
        return shape
    sizes = list(shape)
    sizes[shard.dim] *= axis_of(shard, ranks).size
    return torch.Size(sizes)


def own_part(whole: Tensor, shard: Shard | None, ranks: Ranks) -> Tensor:
    """This rank's slice of a whole tensor, a view."""
    if shard is None:
        return whole
    axis = axis_of(shard, ranks)
    assert whole.shape[shard.dim] % axis.size == 0, (whole.shape, shard, axis.size)
    size = whole.shape[shard.dim] // axis.size
    return whole.narrow(shard.dim, axis.rank * size, size)


def gather_whole(part: Tensor, shard: Shard | None, ranks: Ranks) -> Tensor:
    """The whole tensor from every rank's part; all ranks of the axis call it, for the same parameters in the same
    order."""
    if shard is None:
        return part
    axis = axis_of(shard, ranks)
    if axis.group is None:
        return part
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(axis.size)]
    dist.all_gather(parts, part, group=axis.group)
    return torch.cat(parts, dim=shard.dim)
