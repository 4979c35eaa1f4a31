"""Reads a phase's packed rows from memory-mapped shards: any range, in O(1) of its position. NumPy alone: runs in training ranks.

order.npy holds one line per piece of a document in the order of the phase: shard, sequence, offset in the sequence, length, slot (its
first position in the phase's token stream). The stream is cut into rows of T tokens and the target behind them, and the rows are
shuffled (row_order.py), so that a batch does not hold one document alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tasks.data.row_order import shuffled_rows
from tasks.data.token_shard import open_shard

ORDER_COLUMNS = ("shard", "sequence", "offset", "length", "slot")
ORDER_FILE, PACKING_FILE = "order.npy", "packing.json"


class PackedRows:
    """The rows of a phase: `packed_dir` holds order.npy and packing.json, `shards_dir` the shards that they name."""

    def __init__(self, packed_dir: Path, shards_dir: Path) -> None:
        packing = json.loads((packed_dir / PACKING_FILE).read_text())
        self.sequence_length: int = packing["sequence_length"]
        self._seed: int = packing["seed"]
        self._shards = [open_shard(shards_dir / f"{name}.bin") for name in packing["shards"]]
        order = np.load(packed_dir / ORDER_FILE, mmap_mode="r", allow_pickle=False)
        if order.ndim != 2 or order.shape[1] != len(ORDER_COLUMNS):
            raise ValueError(f"{packed_dir / ORDER_FILE} has shape {order.shape}, expected (pieces, {len(ORDER_COLUMNS)}): pack again")
        self._order = order
        self._slots = np.ascontiguousarray(order[:, 4])
        self._num_rows = int(order[-1, 3] + order[-1, 4] - 1) // self.sequence_length

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and segment numbers of rows start..stop-1, both int32 of shape (rows, T + 1); a segment is a piece of one document."""
        if not 0 <= start < stop <= self._num_rows:
            raise ValueError(f"rows {start}..{stop} of {self._num_rows} packed rows: the phase asks for more tokens than were packed")
        first_tokens = shuffled_rows(np.arange(start, stop), self._num_rows, self._seed) * self.sequence_length
        positions = (first_tokens[:, None] + np.arange(self.sequence_length + 1)).ravel()
        pieces = np.searchsorted(self._slots, positions, side="right") - 1
        shape = (stop - start, self.sequence_length + 1)
        return self._gather(positions, pieces).reshape(shape), pieces.astype(np.int32).reshape(shape)

    def _gather(self, positions: np.ndarray, pieces: np.ndarray) -> np.ndarray:
        """Tokens at stream positions that lie in the given lines of the order."""
        needed, line = np.unique(pieces, return_inverse=True)
        shard_of, sequence, offset, _, slot = np.asarray(self._order[needed]).T
        stream = np.empty(len(positions), dtype=np.int32)
        within = (offset - slot)[line] + positions
        for number in np.unique(shard_of):
            shard, chosen = self._shards[number], (shard_of == number)[line]
            stream[chosen] = shard.tokens[shard.starts[sequence[line[chosen]]] + within[chosen]]
        return stream
