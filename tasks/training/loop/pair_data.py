"""Preference pairs of a phase, step by step, and those that are held out while it trains.

An epoch reads every pair once, in an order decided by the seed. Ranks divide the pairs of a step; where they do not
divide evenly, the last micro-batch of some ranks is a filler, as with packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from configs.schema import DpoObjective
from tasks.data.packing.row_order import shuffled_rows
from tasks.training.loop.batches import refuse_foreign_tokens
from tasks.training.loop.pair_rows import PairRows
from tasks.training.loop.training_step import sum_losses
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.sequence_parallel import own_parts
from tasks.training.state.measurements import Measurement

if TYPE_CHECKING:
    import torch

    from tasks.training.parallel.ranks import Axis
    from tasks.training.parallel.trainable import Trainable
    from tasks.training.schedule.schedules import StepPlan
    from tasks.training.state.job import TrainingJob
    from tasks.training.state.position import Position

PARTS = TRAIN_FILE, VALIDATION_FILE, TEST_FILE = "train.parquet", "validation.parquet", "test.parquet"
"""Pairs to train on, to measure while training, and to judge by."""
REFERENCE_FILE = "reference.parquet"
"""In a DPO job's work directory: what its reference makes of all pairs (pair_scores.py)."""


class PairOrder:
    """Which pair is the k-th of a phase: shuffled by (seed, epoch), every pair once per epoch."""

    def __init__(self, num_pairs: int, seed: int) -> None:
        self._num_pairs, self._seed = num_pairs, seed

    def pairs(self, start: int, stop: int) -> list[int]:
        """Pairs start..stop-1."""
        return [self._index(number) for number in range(start, stop)]

    def _index(self, number: int) -> int:
        epoch, index = divmod(number, self._num_pairs)
        return int(shuffled_rows(np.array([index]), self._num_pairs, self._seed + epoch)[0])


def open_pairs(job: TrainingJob, name: str, is_reference: bool = False) -> PairRows:
    """The pairs of a job's file; for DPO with the reference's log-probabilities, unless they are for the reference."""
    objective, path = job.recipe.objective, Path(job.pairs_dir) / name
    num_slices = job.resources.tensor_parallel * job.resources.context_parallel
    if isinstance(objective, DpoObjective) and not is_reference:
        return PairRows(path, Path(job.work_dir) / REFERENCE_FILE, objective.beta, num_slices)
    return PairRows(path, num_slices=num_slices)


def divided_batches(
    rows: PairRows, pairs: Sequence[int], axis: Axis, num_sequences: int, device: torch.device, first_row: int = 0
) -> list[MicroBatch]:
    """This rank's share of the pairs, in micro-batches of at most `num_sequences` rows; every rank gets the same
    number of them. first_row: the number of the first pair's first row in the phase."""
    at_once = max(1, num_sequences // 2)
    start, stop = (len(pairs) * bound // axis.size for bound in (axis.rank, axis.rank + 1))
    own, fullest = pairs[start:stop], -(-len(pairs) // axis.size)
    batches = [
        rows.micro_batch(own[first : first + at_once], device, first_row=first_row + 2 * (start + first))
        for first in range(0, len(own), at_once)
    ]
    if len(batches) < -(-fullest // at_once):
        batches.append(rows.micro_batch(pairs[:1], device, is_filler=True))
    return batches


class PairData:
    """This rank's part of each step's pairs."""

    def __init__(self, job: TrainingJob, trainable: Trainable) -> None:
        self.job, self.ranks, self.device = job, trainable.ranks, trainable.device
        self.rows = open_pairs(job, TRAIN_FILE)
        self.order = PairOrder(len(self.rows), job.recipe.seed)

    def micro_batches(self, plan: StepPlan) -> list[MicroBatch]:
        """Raises ValueError for token ids that the model has no row for."""
        num_sequences = self.job.resources.micro_batch_sequences
        pairs, first_row = self._pairs_of(plan), 2 * (plan.first_row // 2)
        batches = divided_batches(self.rows, pairs, self.ranks.data, num_sequences, self.device, first_row)
        refuse_foreign_tokens(batches, self.job.recipe.model.vocab_size)
        return own_parts(batches, self.ranks)

    def describe(self, plan: StepPlan, position: Position) -> list[dict[str, object]]:
        return [{"pair_id": self.rows.ids[pair]} for pair in self._pairs_of(plan)]

    def _pairs_of(self, plan: StepPlan) -> list[int]:
        return self.order.pairs(plan.first_row // 2, (plan.first_row + plan.num_rows) // 2)

    def close(self) -> None:
        pass


class HeldOutPairs:
    """The held-out pairs that are measured: the first whose rows fit into validation.num_tokens, at least one."""

    def __init__(self, job: TrainingJob) -> None:
        self.rows, self._num_sequences = open_pairs(job, VALIDATION_FILE), job.resources.micro_batch_sequences
        lengths = np.cumsum([self.rows.num_tokens(pair) for pair in range(len(self.rows))])
        self.pairs = range(max(1, int((lengths <= job.recipe.validation.num_tokens).sum())))

    def measure(self, trainable: Trainable, step: int) -> Measurement:
        """All ranks call it and get the same numbers; weights, moments and random state stay as they are."""
        ranks, num_sequences = trainable.ranks, self._num_sequences
        batches = divided_batches(self.rows, self.pairs, ranks.data, num_sequences, trainable.device)
        (total,) = sum_losses(trainable, [own_parts(batches, ranks)])
        num_terms = len(self.pairs) * ranks.context.size
        return Measurement(step=step, bits_per_byte={}, nats_per_token={}, pair_loss=total / num_terms)
