"""How ranks divide the answers of a step: groups to sample, rows to compute, rows of a micro-batch.

Every rank knows all answers and decides alike; only passes through a model are divided. So a step on several ranks is
that of one process but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.training.parallel.control import gathered
from tasks.training.parallel.ranks import Axis

if TYPE_CHECKING:
    from tasks.training.policy.answer_rows import AnswerRows

T = TypeVar("T")
ALONE = Axis(size=1, rank=0, ranks=(0,), group=None)
"""The data axis of a single process."""


def share_of(number: int, data: Axis) -> slice:
    """This rank's of `number` things in a row; shares differ by at most one, and may be empty."""
    return slice(number * data.rank // data.size, number * (data.rank + 1) // data.size)


def gather(own: Sequence[T], data: Axis) -> list[T]:
    """The shares of all ranks in one list, in the order of the ranks, which are those of the data axis: nothing else
    divides a policy. Who has sampled waits here for the others' tools and long answers, longer than the group of a
    backend would let it."""
    if data.size == 1:
        return [*own]
    return [each for share in gathered(own) for each in share]


def compute_rows(compute: Callable[[AnswerRows], Tensor], rows: AnswerRows, data: Axis) -> Tensor:
    """`compute(rows)`, float32 (B, T) with a number for each position, of which each rank computes its share."""
    if data.size == 1:
        return compute(rows)
    share = share_of(len(rows.token_ids_BT), data)
    whole_BT = torch.zeros_like(rows.rollout_log_probabilities_BT)
    if share.start < share.stop:
        whole_BT[share] = compute(rows.select(share))
    dist.all_reduce(whole_BT, group=data.group)
    return whole_BT


def share_batches(rows: AnswerRows, part: Tensor, num_sequences: int, data: Axis) -> list[tuple[Tensor, bool]]:
    """This rank's micro-batches of the rows whose numbers `part` has, and whether each is a filler: one row again,
    where another rank has more micro-batches. ZeRO sums gradients after every micro-batch, so all ranks have equally
    many."""
    shares = [
        rows.batches(part[len(part) * rank // data.size : len(part) * (rank + 1) // data.size], num_sequences)
        for rank in range(data.size)
    ]
    num_fillers = max(map(len, shares)) - len(shares[data.rank])
    return [*((numbers, False) for numbers in shares[data.rank]), *([(part[:1], True)] * num_fillers)]
