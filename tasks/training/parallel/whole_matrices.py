"""Muon over divided matrices: each is made whole on one of its ranks, only for the orthogonalisation.

A matrix may be divided by ZeRO (runs of elements) and by tensor parallelism (rows or columns). Divided experts need
nothing: each is orthogonalised on its rank. Ranks that share matrices divide the work among them and send each other
the results. Where ZeRO divides them, only parts travel (matrix_homes.py). Without ZeRO all copies of the model hold the
same: tensor ranks of one copy put a matrix together for one of them, and the result is sent to all copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.optimizer.optimizer import Muon, batches, largest_of
from tasks.training.parallel.matrix_homes import Homes, Matrix, Part, find_homes
from tasks.training.parallel.partitions import Piece
from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.shards import Shard, gather_whole, shard_of

Item = tuple[Piece, Tensor]
"""A piece and this rank's elements of its direction, flat."""


class WholeMatrices:
    """`Muon.orthogonalize` for masters that hold pieces of matrices."""

    def __init__(self, optimizer: Muon, pieces: dict[nn.Parameter, Piece], ranks: Ranks, device: torch.device) -> None:
        """`device` is the accelerator, wherever the masters are."""
        self.optimizer, self.ranks, self.device = optimizer, ranks, device
        self.by_master: dict[int, list[Piece]] = {}
        for piece in pieces.values():
            self.by_master.setdefault(id(piece.master), []).append(piece)
        self._homes: dict[tuple[int, ...], Homes] = {}

    def __call__(self, masters: Sequence[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
        """Returns the updates and overwrites the directions with them."""
        alone: list[Item] = []
        copied: dict[Axis, list[Item]] = {}
        divided: dict[Axis, list[Item]] = {}
        for master, direction in zip(masters, directions, strict=True):
            for piece in self.by_master[id(master)]:
                item, axis = (piece, piece.of(direction)), self._group_of(piece)
                if axis.size > 1:
                    kind = copied if piece.master is piece.parameter else divided
                    kind.setdefault(axis, []).append(item)
                elif piece.length:
                    alone.append(item)
        self._update_alone(alone)
        for axis, items in divided.items():
            self._update_divided(items, axis)
        for axis, items in copied.items():
            for first in range(0, len(items), axis.size):
                self._update_copies(items[first : first + axis.size], axis)
        return list(directions)

    def _update_alone(self, items: list[Item]) -> None:
        """Matrices of which no other rank holds a part. An accelerator computes those of one shape together, up to the
        size of the largest: each product is too small for it, and the host could not launch them fast enough."""
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for piece, direction in items:
            by_shape.setdefault(tuple(piece.shape[-2:]), []).append(direction)
        max_elements = largest_of([direction for _, direction in items])
        for shape, alike in by_shape.items():
            for batch in batches(alike, max_elements):
                wholes = [direction.to(self.device).view(-1, *shape) for direction in batch]
                joined = wholes[0] if len(wholes) == 1 else torch.cat(wholes)
                updates = self.optimizer.scaled_polar_factor(joined).split([whole.shape[0] for whole in wholes])
                for direction, update in zip(batch, updates, strict=True):
                    direction.copy_(update.reshape(-1))

    def _group_of(self, piece: Piece) -> Axis:
        """The ranks that hold the same matrices, or parts of them."""
        shard = shard_of(piece.parameter)
        return self.ranks.expert_data if shard is not None and shard.axis == "expert" else self.ranks.stage

    def _update_divided(self, items: list[Item], axis: Axis) -> None:
        key = tuple(id(piece.parameter) for piece, _ in items)
        if key not in self._homes:
            self._homes[key] = find_homes([piece for piece, _ in items], axis, self.ranks, self.device)
        homes = self._homes[key]
        for item, run in groupby(homes.local, key=lambda matrix: matrix.item):
            self._update_local(items[item], list(run))
        for matrices in homes.rounds:
            self._exchange([direction for _, direction in items], [piece for piece, _ in items], matrices, axis)

    def _update_local(self, item: Item, run: list[Matrix]) -> None:
        """Neighbouring matrices of a parameter that are whole here: a run of elements."""
        piece, direction = item
        first, shape = run[0].offset - piece.start, (len(run), *run[0].slice_shape)
        own = direction.narrow(0, first, torch.Size(shape).numel())
        own.copy_(self.optimizer.scaled_polar_factor(own.to(self.device).view(shape)).reshape(-1))

    def _exchange(
        self, directions: list[Tensor], pieces: list[Piece], matrices: Sequence[tuple[Matrix, int]], axis: Axis
    ) -> None:
        """Parts to the homes, results to the holders: one all-to-all each. What stays on this rank is copied."""
        runs = [
            (home, part, directions[m.item].narrow(0, m.offset + part.start - pieces[m.item].start, part.length))
            for m, home in matrices
            for part in m.parts
            if part.rank == axis.rank
        ]
        by_home = [[(part, run) for home, part, run in runs if home == rank] for rank in range(axis.size)]
        mine = [matrix for matrix, home in matrices if home == axis.rank]
        wholes = [torch.empty(matrix.num_slices, *matrix.slice_shape, device=self.device) for matrix in mine]
        by_holder = [_runs_of(rank, mine, wholes) for rank in range(axis.size)]
        sent = [[run for part, run in own if part.is_sent] for own in by_home]
        self._all_to_all(sent, [[run for part, run in own if part.is_sent] for own in by_holder], axis)
        self._orthogonalize(mine, wholes)
        self._all_to_all(
            [[run for _, run in own] for own in by_holder], [[run for _, run in own] for own in by_home], axis
        )

    def _all_to_all(self, sent: list[list[Tensor]], received: list[list[Tensor]], axis: Axis) -> None:
        """By rank of the group the runs that go there, and those that are filled with what comes from it."""
        for run, own in zip(received[axis.rank], sent[axis.rank], strict=True):
            run.copy_(own)
        leaving = [[] if rank == axis.rank else runs for rank, runs in enumerate(sent)]
        coming = [[] if rank == axis.rank else runs for rank, runs in enumerate(received)]
        sent_sizes, received_sizes = ([sum(run.numel() for run in own) for own in each] for each in (leaving, coming))
        buffer, arriving = (torch.empty(sum(sizes), device=self.device) for sizes in (sent_sizes, received_sizes))
        _copy_runs(buffer, [run for own in leaving for run in own], is_to=True)
        dist.all_to_all_single(arriving, buffer, received_sizes, sent_sizes, group=axis.group)
        _copy_runs(arriving, [run for own in coming for run in own], is_to=False)

    def _orthogonalize(self, matrices: list[Matrix], wholes: list[Tensor]) -> None:
        """Overwrites the slices of each matrix."""
        for matrix, whole in zip(matrices, wholes, strict=True):
            joined = whole[0] if matrix.num_slices == 1 else torch.cat(list(whole), matrix.dim)
            update = self.optimizer.scaled_polar_factor(joined)
            for own, slice_of_it in zip(whole, update.chunk(matrix.num_slices, matrix.dim), strict=True):
                own.copy_(slice_of_it)

    def _update_copies(self, items: list[Item], axis: Axis) -> None:
        """At most one matrix per rank: it is orthogonalised there, and the result sent to all."""
        slices = [_tensor_shard(piece) for piece, _ in items]
        mine: Tensor | None = None
        for owner, ((piece, direction), shard) in enumerate(zip(items, slices, strict=True)):
            own = direction.to(self.device).view(piece.shape)
            if shard is not None and self._is_of_own_copy(owner):
                own = gather_whole(own, shard, self.ranks)
            if owner == axis.rank:
                mine = self.optimizer.scaled_polar_factor(own).contiguous().to(own.dtype)
        for owner, ((piece, direction), shard) in enumerate(zip(items, slices, strict=True)):
            result = torch.empty(piece.shape, device=self.device)
            if shard is not None:
                self._send_slices(result, mine if owner == axis.rank else None, shard, owner)
            else:
                result = mine if owner == axis.rank and mine is not None else result
                dist.broadcast(result, src=axis.ranks[owner], group=axis.group)
            direction.copy_(piece.among(result))

    def _is_of_own_copy(self, owner: int) -> bool:
        """Whether a rank of the stage holds a slice of the same copy of the model as this one."""
        return owner // self.ranks.tensor.size == self.ranks.replicas.rank

    def _send_slices(self, result: Tensor, whole: Tensor | None, shard: Shard, owner: int) -> None:
        """Fills this rank's slice: the owner has the whole and gives the tensor ranks of its copy theirs, and each of
        them sends its own to the other copies."""
        tensor, replicas = self.ranks.tensor, self.ranks.replicas
        if self._is_of_own_copy(owner):
            parts = None if whole is None else [each.contiguous() for each in whole.chunk(tensor.size, shard.dim)]
            dist.scatter(result, parts, src=tensor.ranks[owner % tensor.size], group=tensor.group)
        if replicas.size > 1:
            dist.broadcast(result, src=replicas.ranks[owner // tensor.size], group=replicas.group)


def _tensor_shard(piece: Piece) -> Shard | None:
    """How tensor ranks divide a matrix; None where a rank holds all of it."""
    shard = shard_of(piece.parameter)
    return shard if shard is not None and shard.axis == "tensor" else None


def _runs_of(rank: int, matrices: list[Matrix], wholes: list[Tensor]) -> list[tuple[Part, Tensor]]:
    """What a rank holds of these matrices, in the order in which it travels, with its place in the whole ones."""
    return [
        (part, whole[part.slice].view(-1).narrow(0, part.start, part.length))
        for matrix, whole in zip(matrices, wholes, strict=True)
        for part in matrix.parts
        if part.rank == rank
    ]


def _copy_runs(buffer: Tensor, runs: list[Tensor], *, is_to: bool) -> None:
    """Between a buffer and the runs that it holds one after the other."""
    offset = 0
    for run in runs:
        own = buffer.narrow(0, offset, run.numel())
        own.copy_(run) if is_to else run.copy_(own)
        offset += run.numel()
