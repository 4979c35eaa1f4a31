"""Reads a phase's packed rows from memory-mapped shards: any range, in O(1) of its position. NumPy alone: runs in training ranks.

order.npy holds one line per piece of a document in the order of the phase: shard, sequence, offset in the sequence, length, slot. In a
stream the slot is the piece's first position in the token stream, which is cut into rows of T tokens and the target behind them; in
best_fit it is row x (T + 1) + position. The rows are shuffled (row_order.py), so that a batch does not hold one document alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tasks.data.row_order import shuffled_rows
from tasks.data.token_shard import open_mask, open_shard

ORDER_COLUMNS = ("shard", "sequence", "offset", "length", "slot")
ORDER_FILE, PACKING_FILE = "order.npy", "packing.json"
NO_SEGMENT = -1


class PackedRows:
    """The rows of a phase: `packed_dir` holds order.npy and packing.json, `shards_dirs` the shards that they name."""

    def __init__(self, packed_dir: Path, shards_dirs: tuple[Path, ...]) -> None:
        packing = json.loads((packed_dir / PACKING_FILE).read_text())
        self.sequence_length: int = packing["sequence_length"]
        self.is_segmented: bool = packing["packing"] == "best_fit"
        """Whether attention stays inside documents, and no target lies across them."""
        self._seed: int = packing["seed"]
        paths = [_shard_path(name, shards_dirs) for name in packing["shards"]]
        self._shards = [open_shard(path) for path in paths]
        self._masks = [open_mask(path) for path in paths]
        order = np.load(packed_dir / ORDER_FILE, mmap_mode="r", allow_pickle=False)
        if order.ndim != 2 or order.shape[1] != len(ORDER_COLUMNS):
            raise ValueError(f"{packed_dir / ORDER_FILE} has shape {order.shape}, expected (pieces, {len(ORDER_COLUMNS)}): pack again")
        self._order = order
        self._slots = np.ascontiguousarray(order[:, 4])
        self._row_stride = self.sequence_length + 1 if self.is_segmented else self.sequence_length
        last_slot = int(order[-1, 3] + order[-1, 4] - 1)
        self._num_rows = last_slot // self._row_stride + self.is_segmented

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, segment numbers (int32) and trained mask (bool) of rows start..stop-1, each of shape (rows, T + 1).

        A segment is a piece of one document; a gap has token 0 and segment -1. The mask is over tokens as targets: in best_fit the first
        of a piece is none, for nothing of its document stands before it."""
        if not 0 <= start < stop <= self._num_rows:
            raise ValueError(f"rows {start}..{stop} of {self._num_rows} packed rows: the phase asks for more tokens than were packed")
        first_slots = shuffled_rows(np.arange(start, stop), self._num_rows, self._seed) * self._row_stride
        slots = (first_slots[:, None] + np.arange(self.sequence_length + 1)).ravel()
        segments = np.searchsorted(self._slots, slots, side="right") - 1
        tokens, trained = self._gather(slots, segments)
        shape = (stop - start, self.sequence_length + 1)
        return tokens.reshape(shape), segments.astype(np.int32).reshape(shape), trained.reshape(shape)

    def _gather(self, slots: np.ndarray, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and trained mask at slots that lie in or behind the given lines of the order; `segments` behind them become -1."""
        needed, line = np.unique(segments, return_inverse=True)
        shard_of, sequence, offset, length, slot = np.asarray(self._order[needed]).T
        tokens, trained = np.zeros(len(slots), dtype=np.int32), np.zeros(len(slots), dtype=bool)
        within = slots - slot[line]
        is_filled = within < length[line]
        segments[~is_filled] = NO_SEGMENT
        for number in np.unique(shard_of):
            shard, mask = self._shards[number], self._masks[number]
            chosen = (shard_of == number)[line] & is_filled
            places = shard.starts[sequence[line[chosen]]] + (offset[line] + within)[chosen]
            tokens[chosen] = shard.tokens[places]
            trained[chosen] = True if mask is None else mask[places]
        if self.is_segmented:
            trained[within == 0] = False
        return tokens, trained


def _shard_path(name: str, directories: tuple[Path, ...]) -> Path:
    found = [directory / f"{name}.bin" for directory in directories if (directory / f"{name}.bin").exists()]
    assert len(found) == 1, f"shard {name} lies in {len(found)} of {[str(directory) for directory in directories]}"
    return found[0]
