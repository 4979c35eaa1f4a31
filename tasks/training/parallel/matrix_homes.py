"""Which rank orthogonalises which matrix, where ZeRO and tensor parallelism divide matrices among ranks.

Each matrix of the checkpoint (of stacked experts each one) has one home among the ranks that hold parts of it. Its
parts travel there and the results back: one all-to-all per direction and group of the optimizer. No rank repeats
another's work, and a rank sends no more than it holds of matrices that are not whole on it. The costliest matrices
choose first, and take the holder that has the least to do so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from tasks.training.parallel.partitions import Piece
from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.shards import shard_of

MAX_ROUND_ELEMENTS = 1 << 27
"""A home takes at most as many elements at once, or one matrix: half a gigabyte in float32."""


@dataclass(frozen=True)
class Part:
    """A run of the elements of one slice of a matrix, on one rank."""

    rank: int
    """Index in the group."""
    slice: int
    """Which of the tensor ranks' slices it is of; 0 where they hold the matrix alike."""
    start: int
    length: int
    is_sent: bool
    """False for a copy of elements that another rank sends; its results come back all the same."""


@dataclass(frozen=True)
class Matrix:
    """One matrix and who holds it."""

    item: int
    """Index of the parameter in the call."""
    offset: int
    """Of the matrix in this rank's slice of the parameter: 0, or that of an expert in the stack."""
    slice_shape: tuple[int, int]
    num_slices: int
    dim: int
    """Along which the slices are joined."""
    parts: tuple[Part, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.slice_shape) * self.num_slices

    @property
    def cost(self) -> int:
        """Of its Newton-Schulz steps, in products of its short side's square with the long side."""
        rows, columns = self.slice_shape
        return min(rows, columns) * self.num_elements

    @property
    def holders(self) -> tuple[int, ...]:
        return tuple(sorted({part.rank for part in self.parts}))


@dataclass(frozen=True)
class Homes:
    """The work of one group of ranks."""

    local: tuple[Matrix, ...]
    """Matrices that are whole on this rank and on no other."""
    rounds: tuple[tuple[tuple[Matrix, int], ...], ...]
    """Matrices with their homes; a round is one exchange there and one back."""


def find_homes(pieces: Sequence[Piece], axis: Axis, ranks: Ranks, device: torch.device) -> Homes:
    """For parameters that the ranks of `axis` hold parts of; all of them call it, with the same parameters in the same
    order. `device` is the accelerator."""
    everyone = _everyones_runs(pieces, axis, ranks, device)
    matrices = [matrix for item, piece in enumerate(pieces) for matrix in _matrices(item, piece, everyone[:, item])]
    matrices = [matrix for matrix in matrices if matrix.parts]
    local = tuple(each for each in matrices if each.num_slices == 1 and each.holders == (axis.rank,))
    load = [0] * axis.size
    for matrix in matrices:
        if matrix.num_slices == 1 and len(matrix.holders) == 1:
            load[matrix.holders[0]] += matrix.cost
    home: dict[int, int] = {}
    shared = [each for each in matrices if each.num_slices > 1 or len(each.holders) > 1]
    for number in sorted(range(len(shared)), key=lambda number: (-shared[number].cost, number)):
        home[number] = min(shared[number].holders, key=lambda rank: (load[rank], rank))
        load[home[number]] += shared[number].cost
    taken = [0] * axis.size
    rounds: dict[int, list[tuple[Matrix, int]]] = {}
    for number, matrix in enumerate(shared):
        taken[home[number]] += matrix.num_elements
        rounds.setdefault((taken[home[number]] - 1) // MAX_ROUND_ELEMENTS, []).append((matrix, home[number]))
    return Homes(local, tuple(tuple(rounds[number]) for number in sorted(rounds)))


def _everyones_runs(pieces: Sequence[Piece], axis: Axis, ranks: Ranks, device: torch.device) -> torch.Tensor:
    """(ranks, parameters, 4): start and length of a rank's run, its slice, whether its elements are sent."""
    own = []
    for piece in pieces:
        is_sliced = _slice_dim(piece) is not None
        is_copy = axis is ranks.stage and not is_sliced and ranks.tensor.rank > 0
        own.append((piece.start, piece.length, ranks.tensor.rank if is_sliced else 0, not is_copy))
    runs = torch.tensor(own, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(runs) for _ in range(axis.size)]
    dist.all_gather(everyone, runs, group=axis.group)
    return torch.stack(everyone).cpu()


def _slice_dim(piece: Piece) -> int | None:
    """Along which tensor ranks divide the parameter."""
    shard = shard_of(piece.parameter)
    return shard.dim if shard is not None and shard.axis == "tensor" else None


def _matrices(item: int, piece: Piece, runs: torch.Tensor) -> list[Matrix]:
    """The matrices of a parameter."""
    dim = _slice_dim(piece)
    rows, columns = piece.shape[-2:]
    size = rows * columns
    num_slices = 1 if dim is None else int(runs[:, 2].max()) + 1
    matrices = []
    for number in range(piece.shape[:-2].numel()):
        first, last = number * size, (number + 1) * size
        parts = []
        for rank, (start, length, index, is_sent) in enumerate(runs.tolist()):
            low, high = max(start, first), min(start + length, last)
            if low < high:
                parts.append(Part(rank, index, low - first, high - low, bool(is_sent)))
        joined = 0 if dim is None else dim - (len(piece.shape) - 2)
        matrices.append(Matrix(item, first, (rows, columns), num_slices, joined, tuple(parts)))
    return matrices
