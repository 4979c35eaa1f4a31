"""The micro-batches of one optimizer step and one rank: ranks divide the rows that the step's position decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from model.losses import IGNORED
from model.mtp import mtp_targets
from tasks.data.packed_rows import NO_SEGMENT
from tasks.training.schedules import StepPlan

if TYPE_CHECKING:
    import numpy as np

    from tasks.training.ranks import Ranks


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
    """Of the whole row, also where the other tensors hold a part of its positions (tasks/training/sequence_parallel.py)."""
    is_segmented: bool
    """Whether attention stays inside segments; MTP targets do in any case."""
    weights_BT: Tensor | None = None
    """Factor of each target's cross-entropy; None weighs all alike."""
    temperature: float = 1.0
    """Divides the logits: that of the sampling, where the targets were sampled."""
    is_filler: bool = False
    """Nothing to learn from: it only keeps a rank with fewer rows in step with the others."""

    mtp_target_ids_BT: Tensor | None = None
    """The token after the next, or IGNORED; None where it follows from the other tensors, which hold whole rows."""

    @property
    def model_arguments(self) -> dict[str, Any]:
        """What the model takes beside the tokens."""
        segments = {"segment_ids_BT" if self.is_segmented else "mtp_segment_ids_BT": self.segment_ids_BT}
        return segments | {
            "target_ids_BT": self.target_ids_BT, "target_weights_BT": self.weights_BT, "temperature": self.temperature,
            "mtp_target_ids_BT": self.mtp_target_ids_BT,
        }  # fmt: skip

    @property
    def num_rows(self) -> int:
        return self.token_ids_BT.shape[0]

    @property
    def num_positions(self) -> int:
        return 0 if self.is_filler else self.token_ids_BT.numel()

    @property
    def attended(self) -> Tensor:
        """(2,), int64: positions that hold a document's token, and the sum of their documents' squared lengths, or of the rows' where
        attention sees over document ends. Of the whole rows that the segments are of; nothing is read on the host."""
        is_filled_BT = self.segment_ids_BT != NO_SEGMENT
        runs_BT = self.segment_ids_BT if self.is_segmented else torch.zeros_like(self.segment_ids_BT)
        return torch.stack([is_filled_BT.sum(), (squares_up_to(runs_BT) * is_filled_BT).sum()]) * (not self.is_filler)

    @property
    def num_lm_targets(self) -> int:
        return int((self.target_ids_BT != IGNORED).sum())

    @property
    def num_mtp_targets(self) -> int:
        targets = self.mtp_target_ids_BT
        return int(((mtp_targets(self.target_ids_BT, self.segment_ids_BT) if targets is None else targets) != IGNORED).sum())


def squares_up_to(segment_ids_BT: Tensor) -> Tensor:
    """By how much each position makes the squared length of its run of equal ids larger, int64: 1, 3, 5 ... along a run."""
    positions_T = torch.arange(segment_ids_BT.shape[1], device=segment_ids_BT.device)
    is_first_BT = torch.ones_like(segment_ids_BT, dtype=torch.bool)
    is_first_BT[:, 1:] = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    starts_BT = torch.where(is_first_BT, positions_T, 0).cummax(1).values
    return 2 * (positions_T - starts_BT) + 1


def read_micro_batches(rows: Rows, plan: StepPlan, rank: int, num_ranks: int, num_sequences: int, device: torch.device) -> list[MicroBatch]:
    """This rank's share of a step, in micro-batches of at most `num_sequences` rows; every rank gets as many.

    Forward and backward passes gather and exchange among ranks, so where rows do not divide evenly the last micro-batch of some ranks is
    a filler: one of their rows again, without a target."""
    start, stop = (plan.first_row + plan.num_rows * place // num_ranks for place in (rank, rank + 1))
    fullest = -(-plan.num_rows // num_ranks)
    batches = list(_micro_batches(rows, start, stop, num_sequences, device))
    if len(batches) < -(-fullest // num_sequences):
        row = next(_micro_batches(rows, stop - 1, stop, 1, device))
        batches.append(replace(row, target_ids_BT=torch.full_like(row.target_ids_BT, IGNORED), is_filler=True))
    return batches


def own_parts(batches: Iterable[MicroBatch], ranks: Ranks) -> list[MicroBatch]:
    """The micro-batches with the positions that this rank computes: all of them, unless a sequence is divided among ranks."""
    if ranks.context.size == 1:
        return list(batches)
    from tasks.training.sequence_parallel import own_positions

    return [own_positions(batch, ranks) for batch in batches]


def refuse_foreign_tokens(batches: Iterable[MicroBatch], vocab_size: int) -> None:
    """Raises ValueError for ids that the model has no row for: on an accelerator they would end in an assertion of some kernel."""
    highest = max((int(ids.max()) for batch in batches for ids in (batch.token_ids_BT, batch.target_ids_BT)), default=0)
    if highest >= vocab_size:
        raise ValueError(
            f"the shards hold token id {highest}, the model has {vocab_size} rows: they come from another tokenizer; shard the documents "
            "again or raise model.vocab_size"
        )


def _micro_batches(rows: Rows, start: int, stop: int, num_sequences: int, device: torch.device) -> Iterator[MicroBatch]:
    for first in range(start, stop, num_sequences):
        tokens, segments, trained = rows.rows(first, min(first + num_sequences, stop))
        tokens_BS = torch.as_tensor(tokens, dtype=torch.int64, device=device)
        segment_ids_BT = torch.as_tensor(segments, dtype=torch.int64, device=device)[:, :-1]
        is_trained_BT = torch.as_tensor(trained, dtype=torch.bool, device=device)[:, 1:]
        target_ids_BT = tokens_BS[:, 1:].masked_fill(~is_trained_BT, IGNORED)
        yield MicroBatch(tokens_BS[:, :-1].contiguous(), target_ids_BT, segment_ids_BT, rows.is_segmented)
