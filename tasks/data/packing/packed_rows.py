"""Reads a phase's packed rows from memory-mapped shards: any range, in O(1) of its position.

order.npy holds one line per run of a document's tokens in the order of the phase: shard, sequence, offset in the
sequence, length, slot, document. Lines of one document number belong together: a piece of a document, cut for
fill-in-the-middle. In a stream the slot is the piece's first position in the token stream. The stream is cut into
rows of T tokens and the target after them. In best_fit the slot is row x (T + 1) + position. The rows are shuffled
(row_order.py), so that a batch does not hold only one document: over the whole phase, or, where the mixture has
waypoints, inside each slice. Runs in training ranks: imports only NumPy.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tasks.data.packing.row_order import shuffled_rows
from tasks.data.shards.token_shard import open_mask, open_shard

ORDER_COLUMNS = ("shard", "sequence", "offset", "length", "slot", "document")
ORDER_FILE, PACKING_FILE = "order.npy", "packing.json"
GLUE_SHARD = "glue"
"""Shard of the special tokens of fill-in-the-middle; its number follows those of the shards in packing.json."""
NO_SEGMENT = -1


class PackedRows:
    """The rows of a phase: `packed_dir` holds order.npy and packing.json, `shards_dirs` the shards that they name."""

    def __init__(self, packed_dir: Path, shards_dirs: tuple[Path, ...]) -> None:
        packing = json.loads((packed_dir / PACKING_FILE).read_text())
        self.sequence_length: int = packing["sequence_length"]
        self.is_segmented: bool = packing["packing"] == "best_fit"
        """Whether attention and targets stay inside a document."""
        self._seed: int = packing["seed"]
        paths = [_shard_path(name, shards_dirs) for name in packing["shards"]]
        paths += [packed_dir / f"{GLUE_SHARD}.bin"] if packing["has_glue"] else []
        self._paths = paths
        self._shards = [open_shard(path) for path in paths]
        self._masks = [open_mask(path, len(shard.tokens)) for path, shard in zip(paths, self._shards, strict=True)]
        order = _open_order(packed_dir / ORDER_FILE)
        if order.ndim != 2 or order.shape[1] != len(ORDER_COLUMNS):
            raise ValueError(
                f"{packed_dir / ORDER_FILE} has shape {order.shape}, expected (pieces, {len(ORDER_COLUMNS)}): pack "
                f"again"
            )
        self._order = order
        self._slots = np.ascontiguousarray(order[:, 4])
        self._row_stride = self.sequence_length + 1 if self.is_segmented else self.sequence_length
        last_slot = int(order[-1, 3] + order[-1, 4] - 1)
        self._num_rows = last_slot // self._row_stride + self.is_segmented
        self._slice_rows = packing.get("slice_rows", self._num_rows)

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, segment numbers (int32) and trained mask (bool) of rows start..stop-1, each of shape (rows, T + 1).

        A segment is a piece of one document; a gap has token 0 and segment -1. The mask is over tokens as targets: in
        best_fit the first token of a piece is no target, since no token of its document precedes it."""
        if not 0 <= start < stop <= self._num_rows:
            raise ValueError(
                f"rows {start}..{stop} of {self._num_rows} packed rows: the phase asks for more tokens than were packed"
            )
        first_slots = self._unshuffled_rows(start, stop) * self._row_stride
        slots = (first_slots[:, None] + np.arange(self.sequence_length + 1)).ravel()
        tokens, segments, trained = self._gather(slots, np.searchsorted(self._slots, slots, side="right") - 1)
        shape = (stop - start, self.sequence_length + 1)
        return tokens.reshape(shape), segments.astype(np.int32).reshape(shape), trained.reshape(shape)

    def describe(self, start: int, stop: int) -> list[dict[str, object]]:
        """Row, document id (from the shard's sidecar, if there is one), file, byte offset and tokens of every piece in
        rows start..stop-1."""
        pieces: list[dict[str, object]] = []
        identities: dict[Path, dict[int, str]] = {}
        firsts = self._unshuffled_rows(start, stop) * self._row_stride
        for row, first in zip(range(start, stop), firsts.tolist(), strict=True):
            line = int(np.searchsorted(self._slots, first, side="right")) - 1
            while line < len(self._order) and self._slots[line] <= first + self.sequence_length:
                number, sequence, offset, length, slot = self._order[line, :5].tolist()
                line += 1
                skipped = max(0, first - slot)
                num_tokens = min(length, first + self.sequence_length + 1 - slot) - skipped
                if num_tokens <= 0:
                    continue
                path, shard = self._paths[number], self._shards[number]
                if path not in identities:
                    identities[path] = _document_ids(path)
                position = int(shard.starts[sequence]) + offset + skipped
                pieces.append(
                    {
                        "row": row,
                        "document": identities[path].get(sequence, ""),
                        "file": path.name,
                        "byte_offset": position * shard.tokens.dtype.itemsize,
                        "num_tokens": num_tokens,
                    }
                )
        return pieces

    def _unshuffled_rows(self, start: int, stop: int) -> np.ndarray:
        """Numbers of rows start..stop-1 in the unshuffled order: they are shuffled over the whole phase, or, with
        waypoints, inside each slice."""
        rows = np.arange(start, stop)
        slices = rows // self._slice_rows
        for number in np.unique(slices).tolist():
            own, first = slices == number, number * self._slice_rows
            count = min(self._slice_rows, self._num_rows - first)
            rows[own] = first + shuffled_rows(rows[own] - first, count, self._seed + number)
        return rows

    def _gather(self, slots: np.ndarray, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, segments and trained mask at slots in, or after, the given lines of the order."""
        needed, line = np.unique(lines, return_inverse=True)
        shard_of, sequence, offset, length, slot, document = np.asarray(self._order[needed]).T
        is_first = (needed == 0) | (np.asarray(self._order[np.maximum(needed - 1, 0), 5]) != document)
        tokens, trained = np.zeros(len(slots), dtype=np.int32), np.zeros(len(slots), dtype=bool)
        within = slots - slot[line]
        is_filled = within < length[line]
        segments = np.where(is_filled, document[line], NO_SEGMENT)
        for number in np.unique(shard_of):
            shard, mask = self._shards[number], self._masks[number]
            chosen = (shard_of == number)[line] & is_filled
            positions = shard.starts[sequence[line[chosen]]] + (offset[line] + within)[chosen]
            tokens[chosen] = shard.tokens[positions]
            trained[chosen] = True if mask is None else mask[positions]
        if self.is_segmented:
            trained[(within == 0) & is_first[line]] = False
        return tokens, segments, trained


def _open_order(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is cut short or damaged ({error}): pack again") from error


def _document_ids(bin_path: Path) -> dict[int, str]:
    """Document id of each sequence of a shard; empty without a sidecar."""
    sidecar = bin_path.with_suffix(".parquet")
    if not sidecar.exists():
        return {}
    import pyarrow.parquet as pq

    columns = pq.read_table(sidecar, columns=["sequence", "id"]).to_pydict()
    return dict(zip(columns["sequence"], columns["id"], strict=True))


def _shard_path(name: str, directories: tuple[Path, ...]) -> Path:
    existing = [directory / f"{name}.bin" for directory in directories if (directory / f"{name}.bin").exists()]
    assert len(existing) == 1, f"shard {name} is in {len(existing)} of {[str(directory) for directory in directories]}"
    return existing[0]
