"""Preference pairs as rows of a micro-batch. Runs in ranks and in evaluation.

In: a Parquet file of tasks/data/packing/pack_pairs.py. Rows 2p and 2p + 1 are pair p, the preferred answer first. A
row holds a whole conversation, padded at the end to the longest of its micro-batch, and on to equal slices where ranks
divide the positions; targets are the tokens of the answer, the only turn in which the two rows differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from model.architecture.losses import IGNORED
from model.architecture.preferences import Preference
from tasks.data.packing.packed_rows import NO_SEGMENT
from tasks.training.parallel.micro_batch import MicroBatch

if TYPE_CHECKING:
    import pyarrow as pa

SIDES = ("chosen", "rejected")


class PairRows:
    """The pairs of one file, and how likely the reference finds each answer."""

    def __init__(self, path: Path, reference_path: Path | None = None, beta: float = 1.0, num_slices: int = 1) -> None:
        """`reference_path` holds log-probabilities of the same pairs (pair_scores.py); without one
        they count as 0. `num_slices`: into how many equal slices ranks divide the positions. Raises ValueError where
        the reference lacks a pair."""
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        self.ids: list[str] = table.column("id").to_pylist()
        self._tokens = {side: _lists(table.column(side)) for side in SIDES}
        self._starts = table.column("answer_start").to_numpy()
        self._beta, self._num_slices = beta, num_slices
        self.reference_P2 = np.zeros((len(self.ids), 2))
        if reference_path is not None:
            self.reference_P2 = _reference(reference_path, self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def num_tokens(self, pair: int) -> int:
        """Of both rows."""
        return sum(len(self._sequence(side, pair)) for side in SIDES)

    def micro_batch(
        self, pairs: Sequence[int], device: torch.device, is_filler: bool = False, first_row: int = 0
    ) -> MicroBatch:
        """These pairs; a filler weighs nothing. first_row: the number of their first row in the phase."""
        rows = [(self._sequence(side, pair), int(self._starts[pair])) for pair in pairs for side in SIDES]
        longest = max(len(sequence) for sequence, _ in rows)
        shape = (len(rows), -(-longest // self._num_slices) * self._num_slices)
        tokens_BT, targets_BT = np.zeros(shape, np.int64), np.full(shape, IGNORED)
        segments_BT = np.full(shape, NO_SEGMENT)
        for row, (sequence, start) in enumerate(rows):
            tokens_BT[row, : len(sequence)] = sequence
            targets_BT[row, start - 1 : len(sequence) - 1] = sequence[start:]
            segments_BT[row, : len(sequence)] = 0
        last_B = torch.tensor([len(sequence) - 1 for sequence, _ in rows], device=device)
        reference_B = torch.tensor(self.reference_P2[list(pairs)].ravel(), dtype=torch.float32, device=device)
        return MicroBatch(
            *(torch.as_tensor(values, device=device) for values in (tokens_BT, targets_BT, segments_BT)),
            is_segmented=False,
            is_filler=is_filler,
            row_numbers_B=torch.arange(first_row, first_row + len(rows), device=device),
            has_gaps=bool((segments_BT == NO_SEGMENT).any()),
            preference=Preference(last_B, reference_B, self._beta),
        )

    def _sequence(self, side: str, pair: int) -> np.ndarray:
        values, offsets = self._tokens[side]
        return values[offsets[pair] : offsets[pair + 1]]


def _lists(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Values and offsets of a column of lists."""
    lists = column.combine_chunks()
    return lists.flatten().to_numpy(), lists.offsets.to_numpy() - lists.offsets[0].as_py()


def _reference(path: Path, ids: Sequence[str]) -> np.ndarray:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    values = np.stack([table.column(side).to_numpy() for side in SIDES], 1)
    rows = {identity: row for row, identity in enumerate(table.column("id").to_pylist())}
    absent = [identity for identity in ids if identity not in rows]
    if absent:
        raise ValueError(f"{path} lacks pair {absent[0]} ({len(absent)} in all): score the same pairs again")
    return values[[rows[identity] for identity in ids]]
