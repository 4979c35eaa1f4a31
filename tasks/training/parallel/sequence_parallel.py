"""Sequence parallelism (Ulysses): a context rank holds an equal, contiguous part of every row's positions.

All layers but attention work on single positions. Attention exchanges: each rank receives all positions of its share of
the heads, attends as one device would, and sends the positions back (arXiv 2309.14509). If there are fewer key and
value heads than ranks, they are repeated before the exchange. Besides attention three things need more than a part:
RoPE (positions start at part x length), the MTP layer (the next part's first embedding, and targets two tokens on), the
balance loss (counts over the whole sequence). Segment ids stay those of the whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from model.architecture.attention import Attention, Visible
from model.architecture.moe import MixtureOfExperts
from model.architecture.mtp import MtpLayer, mtp_targets
from model.architecture.transformer import Glm4Moe
from tasks.training.parallel.all_to_all import exchange_rows
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.tensor_collectives import cut_slice

Attend = Callable[[Tensor, Tensor, Tensor, Visible], Tensor]


def spread_sequence(model: Glm4Moe, ranks: Ranks) -> None:
    """Make the model take the parts that `own_positions` gives; before tensor parallelism, which wraps what is set
    here.

    The lm and mtp losses are means over the part's targets; the balance loss is defined so that its mean over the parts
    is the sequence's.
    """
    axis = ranks.context
    if axis.size == 1:
        return
    model.part, model.num_parts = axis.rank, axis.size
    model.pair_for_mtp = partial(pair_across_parts, axis=axis)
    model.sum_over_parts = partial(_sum_over, axis=axis)
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, Attention):
                # The MTP layer has no position for a row's last token.
                module.attend = AttendByHeads(module.attend, axis, num_missing=int(isinstance(layer, MtpLayer)))
            if isinstance(module, MixtureOfExperts):
                module.sum_over_parts = partial(_sum_over, axis=axis)
                module.own_positions = partial(cut_slice, axis=axis)


def own_parts(batches: Iterable[MicroBatch], ranks: Ranks) -> list[MicroBatch]:
    """The micro-batches with the positions that this rank computes: all of them, unless a sequence is divided among
    ranks."""
    return [own_positions(batch, ranks) for batch in batches]


def own_positions(batch: MicroBatch, ranks: Ranks) -> MicroBatch:
    """This rank's part of the positions of all rows, with the MTP targets, which may come after the part."""
    axis = ranks.context
    if axis.size == 1:
        return batch
    num_positions = batch.token_ids_BT.shape[1]
    assert num_positions % axis.size == 0, (num_positions, axis.size)
    length = num_positions // axis.size
    part = slice(axis.rank * length, (axis.rank + 1) * length)
    return replace(
        batch,
        token_ids_BT=batch.token_ids_BT[:, part],
        target_ids_BT=batch.target_ids_BT[:, part],
        weights_BT=None if batch.weights_BT is None else batch.weights_BT[:, part],
        values=None if batch.values is None else batch.values.at(part),
        mtp_target_ids_BT=mtp_targets(batch.target_ids_BT, batch.segment_ids_BT)[:, part],
    )


class AttendByHeads:
    """Attention over all positions by a share of the heads. `num_missing`: by how many positions the last part is
    shorter."""

    def __init__(self, attend: Attend, axis: Axis, num_missing: int) -> None:
        assert axis.group is not None, axis
        self.attend, self.axis, self.group, self.num_missing = attend, axis, axis.group, num_missing

    def __call__(self, query_BTNH: Tensor, key_BTGH: Tensor, value_BTGH: Tensor, visible_BTS: Visible) -> Tensor:
        num_parts, length = self.axis.size, query_BTNH.shape[1]
        is_last = self.axis.rank == num_parts - 1
        full = length + self.num_missing if is_last else length
        lengths = [*([full] * (num_parts - 1)), full - self.num_missing]
        shares = [_shares_of_heads(heads, num_parts) for heads in (query_BTNH, key_BTGH, value_BTGH)]
        sizes = [share.shape[3] for share in shares]
        # Rows of the exchange are positions, so those of all ranks arrive in their order.
        leaving = torch.cat(shares, dim=3).permute(2, 1, 0, 3, 4).flatten(0, 1)
        arrived = exchange_rows(leaving, [length] * num_parts, lengths, self.group).transpose(0, 1)
        query, key, value = arrived.split(sizes, dim=2)
        mixed = self.attend(query, key, value, visible_BTS)
        returned = exchange_rows(mixed.transpose(0, 1), lengths, [length] * num_parts, self.group)
        return returned.unflatten(0, (num_parts, length)).permute(2, 1, 0, 3, 4).flatten(2, 3)


def _shares_of_heads(heads_BTNH: Tensor, num_parts: int) -> Tensor:
    """(B, T, parts, heads of a part, H). If there are fewer heads than parts, heads are repeated: each part has the one
    that its queries attend with."""
    num_heads = heads_BTNH.shape[2]
    if num_heads < num_parts:
        heads_BTNH = heads_BTNH.repeat_interleave(num_parts // num_heads, dim=2)
    return heads_BTNH.unflatten(2, (num_parts, -1))


def pair_across_parts(embedded_BTD: Tensor, hidden_BTD: Tensor, *, axis: Axis) -> tuple[Tensor, Tensor]:
    """What the MTP layer takes: the embedding of the token after each position; that of the last position comes from
    the next part. A row's last position has none and is left out."""
    assert axis.group is not None, axis
    num_rows, sent, received = embedded_BTD.shape[0], [0] * axis.size, [0] * axis.size
    is_first, is_last = axis.rank == 0, axis.rank == axis.size - 1
    if not is_first:
        sent[axis.rank - 1] = num_rows
    if not is_last:
        received[axis.rank + 1] = num_rows
    # The first part sends and the last part receives no row, yet both take part, in the backward pass too.
    arrived = exchange_rows(embedded_BTD[:0, 0] if is_first else embedded_BTD[:, 0], sent, received, axis.group)
    behind_BTD = arrived.view(num_rows, 0 if is_last else 1, embedded_BTD.shape[2])
    return torch.cat([embedded_BTD[:, 1:], behind_BTD], dim=1), hidden_BTD[:, :-1] if is_last else hidden_BTD


def _sum_over(values: Tensor, *, axis: Axis) -> Tensor:
    total = values.clone()
    dist.all_reduce(total, group=axis.group)
    return total
