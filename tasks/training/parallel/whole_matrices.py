"""Muon over divided matrices: each is made whole on one of its ranks, only for the orthogonalisation.

A matrix may be divided by ZeRO (runs of elements) and by tensor parallelism (rows or columns). Divided experts need
nothing: each is orthogonalised on its rank. Ranks that share matrices divide the work among them and send each other
the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.optimizer.optimizer import Muon
from tasks.training.parallel.partitions import Piece, assemble, sharers
from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.shards import gather_whole, own_part, shard_of


class WholeMatrices:
    """`Muon.orthogonalize` for masters that hold pieces of matrices."""

    def __init__(self, optimizer: Muon, pieces: dict[nn.Parameter, Piece], ranks: Ranks, device: torch.device) -> None:
        """`device` is the accelerator, wherever the masters are."""
        self.optimizer, self.ranks, self.device = optimizer, ranks, device
        self.by_master: dict[int, list[Piece]] = {}
        for piece in pieces.values():
            self.by_master.setdefault(id(piece.master), []).append(piece)

    def __call__(self, masters: Sequence[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
        """Returns the updates and overwrites the directions with them."""
        alone: list[tuple[Piece, Tensor]] = []
        shared: dict[Axis, list[tuple[Piece, Tensor]]] = {}
        for master, direction in zip(masters, directions, strict=True):
            for piece in self.by_master[id(master)]:
                axis = sharers(piece.parameter, self.ranks)
                # Whole on every sharer (no ZeRO) or in pieces: either way all of them need the result.
                if axis.size > 1 and (piece.is_shared or piece.master is piece.parameter):
                    shared.setdefault(axis, []).append((piece, piece.of(direction)))
                elif piece.length:
                    alone.append((piece, piece.of(direction)))
        for piece, direction in alone:
            direction.copy_(self._update_of_part(direction.to(self.device).view(piece.shape), piece).view(-1))
        for axis, items in shared.items():
            for first in range(0, len(items), axis.size):
                self._divide_work(items[first : first + axis.size], axis)
        return list(directions)

    def _divide_work(self, items: list[tuple[Piece, Tensor]], axis: Axis) -> None:
        """At most one matrix per sharer: gather each on its sharer, orthogonalise it there, send the results to all."""
        mine: Tensor | None = None
        for owner, (piece, direction) in enumerate(items):
            part = assemble(direction, piece, axis, self.device, to=owner)
            if owner == axis.rank:
                mine = part
        if mine is not None:
            mine = self._update_of_part(mine, items[axis.rank][0])
        for owner, (piece, direction) in enumerate(items):
            result = mine if owner == axis.rank and mine is not None else torch.empty(piece.shape, device=self.device)
            dist.broadcast(result, src=axis.ranks[owner], group=axis.group)
            direction.copy_(piece.among(result))

    def _update_of_part(self, part: Tensor, piece: Piece) -> Tensor:
        shard = shard_of(piece.parameter)
        if shard is None or (shard.axis == "expert" and shard.dim == 0 and part.ndim == 3):
            return self.optimizer.scaled_polar_factor(part).contiguous()
        whole = gather_whole(part, shard, self.ranks)
        return own_part(self.optimizer.scaled_polar_factor(whole), shard, self.ranks).contiguous()
