"""The micro-batches of one optimizer step and one rank: ranks divide the rows that the step's position decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from model.losses import IGNORED
from model.mtp import mtp_targets
from tasks.training.schedules import StepPlan

if TYPE_CHECKING:
    import numpy as np


class Rows(Protocol):
    """A phase's packed rows: see tasks/data/packed_rows.py."""

    @property
    def is_segmented(self) -> bool: ...

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class MicroBatch:
    token_ids_BT: Tensor
    target_ids_BT: Tensor
    """The next token, or IGNORED where it is not trained."""
    segment_ids_BT: Tensor
    is_segmented: bool
    """Whether attention stays inside segments; MTP targets do in any case."""
    weights_BT: Tensor | None = None
    """Factor of each target's cross-entropy; None weighs all alike."""
    temperature: float = 1.0
    """Divides the logits: that of the sampling, where the targets were sampled."""

    @property
    def num_rows(self) -> int:
        return self.token_ids_BT.shape[0]

    @property
    def num_lm_targets(self) -> int:
        return int((self.target_ids_BT != IGNORED).sum())

    @property
    def num_mtp_targets(self) -> int:
        return int((mtp_targets(self.target_ids_BT, self.segment_ids_BT) != IGNORED).sum())


def read_micro_batches(rows: Rows, plan: StepPlan, rank: int, num_ranks: int, num_sequences: int, device: torch.device) -> list[MicroBatch]:
    """This rank's share of a step, in micro-batches of at most `num_sequences` rows."""
    start = plan.first_row + plan.num_rows * rank // num_ranks
    stop = plan.first_row + plan.num_rows * (rank + 1) // num_ranks
    return list(_micro_batches(rows, start, stop, num_sequences, device))


def _micro_batches(rows: Rows, start: int, stop: int, num_sequences: int, device: torch.device) -> Iterator[MicroBatch]:
    for first in range(start, stop, num_sequences):
        tokens, segments, trained = rows.rows(first, min(first + num_sequences, stop))
        tokens_BS = torch.as_tensor(tokens, dtype=torch.int64, device=device)
        segment_ids_BT = torch.as_tensor(segments, dtype=torch.int64, device=device)[:, :-1]
        is_trained_BT = torch.as_tensor(trained, dtype=torch.bool, device=device)[:, 1:]
        target_ids_BT = tokens_BS[:, 1:].masked_fill(~is_trained_BT, IGNORED)
        yield MicroBatch(tokens_BS[:, :-1].contiguous(), target_ids_BT, segment_ids_BT, rows.is_segmented)
