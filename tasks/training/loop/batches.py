"""The micro-batches of one optimizer step and one rank: ranks divide the rows that the step's position decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from model.architecture.losses import IGNORED
from tasks.data.packing.packed_rows import NO_SEGMENT
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.schedule.schedules import StepPlan

if TYPE_CHECKING:
    import numpy as np


class Rows(Protocol):
    """A phase's packed rows: see tasks/data/packing/packed_rows.py."""

    @property
    def is_segmented(self) -> bool: ...

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

    def close(self) -> None: ...


def read_micro_batches(
    rows: Rows, plan: StepPlan, rank: int, num_ranks: int, num_sequences: int, device: torch.device
) -> list[MicroBatch]:
    """This rank's share of a step, in micro-batches of at most `num_sequences` rows; every rank gets the same number.
    Forward and backward passes gather and exchange among ranks, so where rows do not divide evenly the last micro-batch
    of some ranks is a filler: one of their rows again, without a target."""
    start, stop = (plan.first_row + plan.num_rows * bound // num_ranks for bound in (rank, rank + 1))
    fullest = -(-plan.num_rows // num_ranks)
    own = rows.rows(start, stop)
    batches = [
        _micro_batch(
            [values[first : first + num_sequences] for values in own], rows.is_segmented, device, start + first
        )
        for first in range(0, stop - start, num_sequences)
    ]
    if len(batches) < -(-fullest // num_sequences):
        row = _micro_batch([values[-1:] for values in own], rows.is_segmented, device, stop - 1)
        batches.append(replace(row, target_ids_BT=torch.full_like(row.target_ids_BT, IGNORED), is_filler=True))
    return batches


def refuse_foreign_tokens(batches: Iterable[MicroBatch], vocab_size: int) -> None:
    """Raises ValueError for ids that the model has no row for: on an accelerator they would end in an assertion of some
    kernel."""
    highest = max((int(ids.max()) for batch in batches for ids in (batch.token_ids_BT, batch.target_ids_BT)), default=0)
    if highest >= vocab_size:
        raise ValueError(
            f"the shards hold token id {highest}, the model has {vocab_size} rows: they come from another tokenizer; "
            f"shard the documents "
            "again or raise model.vocab_size"
        )


def _micro_batch(rows: list[np.ndarray], is_segmented: bool, device: torch.device, first_row: int) -> MicroBatch:
    tokens, segments, trained = rows
    tokens_BS = torch.as_tensor(tokens, dtype=torch.int64, device=device)
    segment_ids_BT = torch.as_tensor(segments, dtype=torch.int64, device=device)[:, :-1]
    is_trained_BT = torch.as_tensor(trained, dtype=torch.bool, device=device)[:, 1:]
    target_ids_BT = tokens_BS[:, 1:].masked_fill(~is_trained_BT, IGNORED)
    num_documents = len(segments) + int((segments[:, 1:-1] != segments[:, :-2]).sum())
    return MicroBatch(
        tokens_BS[:, :-1].contiguous(),
        target_ids_BT,
        segment_ids_BT,
        is_segmented,
        row_numbers_B=torch.arange(first_row, first_row + len(tokens), device=device),
        max_documents=num_documents,
        has_gaps=bool((segments[:, :-1] == NO_SEGMENT).any()),
    )
