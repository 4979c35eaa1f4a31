"""What each rank writes and reads of a parameter: the ranks that hold it do so once, together.

ZeRO's partitions differ from rank to rank. What several ranks hold alike (without ZeRO all of a parameter; norms and
routers on tensor-parallel ranks) they divide evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from model.formats.checkpoint_names import checkpoint_names
from tasks.training.parallel.partitions import Piece
from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.shards import Shard, axis_of, shard_of, whole_shape
from tasks.training.state.tensor_runs import Run, matrix_of

MIN_WINDOW_ELEMENTS = 1 << 18
"""Of float32: a megabyte."""


def holders(parameter: Tensor, ranks: Ranks) -> Axis:
    """The ranks that together hold a parameter as it was before ZeRO divided it: their own ranges tile it."""
    shard = shard_of(parameter)
    if shard is None:
        return ranks.stage
    return ranks.expert_data if shard.axis == "expert" else ranks.replicas


def own_range(piece: Piece, ranks: Ranks) -> tuple[int, int]:
    """First element of the flattened parameter that this rank writes and reads, and the one after the last."""
    index, num_copies = 0, 1
    if piece.master is piece.parameter:
        axis = holders(piece.parameter, ranks)
        index, num_copies = axis.rank, axis.size
    elif shard_of(piece.parameter) is None:
        index, num_copies = ranks.tensor.rank, ranks.tensor.size
    first, stop = (piece.start + piece.length * number // num_copies for number in (index, index + 1))
    return first, stop


def tensor_bounds(name: str, piece: Piece) -> Iterator[tuple[int, int]]:
    """First element and the one after the last of each checkpoint tensor in the flattened parameter: of stacked experts
    there is one per expert."""
    is_stacked = checkpoint_names(name, 1) != [name]
    size = piece.shape[1:].numel() if is_stacked else piece.shape.numel()
    yield from ((first, first + size) for first in range(0, piece.shape.numel(), size))


def windows(name: str, piece: Piece) -> Iterator[tuple[int, int]]:
    """As `tensor_bounds`, small neighbours together: what is read, and exchanged, at once."""
    first = stop = 0
    for _, stop in tensor_bounds(name, piece):
        if stop - first >= MIN_WINDOW_ELEMENTS:
            yield first, stop
            first = stop
    if first < stop:
        yield first, stop


def runs_of(name: str, piece: Piece, first: int, stop: int, ranks: Ranks) -> Iterator[Run]:
    """Elements `first` to `stop` of a flattened parameter as runs of the checkpoint's tensors, in order."""
    shard = shard_of(piece.parameter)
    whole = whole_shape(piece.parameter, piece.shape, ranks)
    names = checkpoint_names(name, whole[0])
    if names != [name]:
        whole = whole[1:]
        if shard is not None and shard.dim == 0:
            first_expert = axis_of(shard, ranks).rank * piece.shape[0]
            names, shard = names[first_expert:], None
        elif shard is not None:
            shard = replace(shard, dim=shard.dim - 1)
    for each, (low, high) in zip(names, tensor_bounds(name, piece), strict=False):
        begin, end = max(low, first), min(high, stop)
        if begin < end:
            yield _run(each, whole, shard, begin - low, end - begin, ranks)


def _run(tensor: str, whole: torch.Size, shard: Shard | None, start: int, length: int, ranks: Ranks) -> Run:
    box = matrix_of(whole)
    if shard is not None:
        axis = axis_of(shard, ranks)
        low, high = (whole[shard.dim] // axis.size * number for number in (axis.rank, axis.rank + 1))
        names = ("first_row", "stop_row") if shard.dim == 0 else ("first_column", "stop_column")
        box = box._replace(**dict(zip(names, (low, high), strict=True)))
    return Run(tensor, tuple(whole), box, start, length)
