"""Reads a phase's packed rows by position: any range, from files in a directory or in S3, none of which is read whole.

The order (packed_order.py) has one line per run of a document's tokens: shard, sequence, offset in the sequence,
length, slot, document. Lines of one document number belong together: a piece of a document, cut for
fill-in-the-middle. In a stream the slot is the piece's first position in the token stream. The stream is cut into
rows of T tokens and the target after them. In best_fit the slot is row x (T + 1) + position. The rows are shuffled
(row_order.py), so that a batch does not hold only one document: over the whole phase, or, where the mixture has
waypoints, inside each slice. Runs in training ranks: imports only NumPy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from configs.files.block_reader import BlockReader
from configs.files.stored_files import StoredFile, VerifiedReader
from tasks.data.packing.packed_order import PackedOrder
from tasks.data.packing.row_order import shuffled_rows
from tasks.data.shards.stored_shard import StoredShard, open_shards

PACKING_FILE = "packing.json"
GLUE_SHARD = "glue"
"""Shard of the special tokens of fill-in-the-middle; its number follows those of the shards in packing.json."""
NO_SEGMENT = -1
MAX_SEGMENT = 2**31
"""Numbers of documents begin again here: segments are int32, and a phase can have more pieces."""


class PackedRows:
    """The rows of a phase: `packed` are its order and packing.json, `shards` those that they name."""

    def __init__(self, packed: Iterable[StoredFile], shards: Iterable[StoredFile], blocks: BlockReader) -> None:
        """`blocks` is closed with the rows. A shard is opened when the first row needs it."""
        self._blocks = blocks
        own = {file.name: file for file in packed}
        with VerifiedReader(own[PACKING_FILE]) as file:
            packing = json.loads(file.read())
        self.sequence_length: int = packing["sequence_length"]
        self.is_segmented: bool = packing["packing"] == "best_fit"
        """Whether attention and targets stay inside a document."""
        self._seed: int = packing["seed"]
        self._shards = _shards_of(packing["shards"], open_shards(shards, blocks))
        if packing["has_glue"]:
            self._shards.append(open_shards(own.values(), blocks)[GLUE_SHARD])
        self._order = PackedOrder(own, packing["parts"], blocks)
        self._row_stride = self.sequence_length + 1 if self.is_segmented else self.sequence_length
        _, _, _, length, slot, _ = self._order.lines(np.array([len(self._order) - 1]))[0].tolist()
        self._num_rows = (slot + length - 1) // self._row_stride + self.is_segmented
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
        tokens, segments, trained = self._gather(slots, self._lines_of(first_slots))
        shape = (stop - start, self.sequence_length + 1)
        return tokens.reshape(shape), segments.astype(np.int32).reshape(shape), trained.reshape(shape)

    def describe(self, start: int, stop: int) -> list[dict[str, object]]:
        """Row, document id (from the shard's sidecar, if there is one), file, byte offset and tokens of every piece in
        rows start..stop-1."""
        pieces: list[dict[str, object]] = []
        identities: dict[int, dict[int, str]] = {}
        firsts = self._unshuffled_rows(start, stop) * self._row_stride
        for row, first in zip(range(start, stop), firsts.tolist(), strict=True):
            for number, sequence, offset, length, slot, _ in self._order.lines(
                self._lines_of(np.array([first]))
            ).tolist():
                skipped = max(0, first - slot)
                num_tokens = min(length, first + self.sequence_length + 1 - slot) - skipped
                if num_tokens <= 0:
                    continue
                shard = self._shards[number]
                if number not in identities:
                    identities[number] = shard.document_ids()
                position = int(shard.starts(np.array([sequence]))[0]) + offset + skipped
                pieces.append(
                    {
                        "row": row,
                        "document": identities[number].get(sequence, ""),
                        "file": shard.file.name,
                        "byte_offset": position * shard.tokens.dtype.itemsize,
                        "num_tokens": num_tokens,
                    }
                )
        return pieces

    def close(self) -> None:
        self._blocks.close()

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

    def _lines_of(self, first_slots: np.ndarray) -> np.ndarray:
        """Numbers of the lines in the rows that begin at these slots, ascending."""
        bounds = self._order.lines_at(np.concatenate([first_slots, first_slots + self.sequence_length]))
        firsts, lasts = np.split(bounds, 2)
        return np.unique(
            np.concatenate([np.arange(first, last + 1) for first, last in zip(firsts, lasts, strict=True)])
        )

    def _gather(self, slots: np.ndarray, needed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, segments and trained mask at slots in, or after, lines of these numbers."""
        shard_of, sequence, offset, length, slot, document = self._order.lines(needed).T
        before = self._order.lines(np.maximum(needed - 1, 0))
        is_first = (needed == 0) | (before[:, 5] != document)
        line = np.searchsorted(slot, slots, side="right") - 1
        within = slots - slot[line]
        is_filled = within < length[line]
        segments = np.where(is_filled, document[line] % MAX_SEGMENT, NO_SEGMENT)
        chosen = {number: (shard_of == number)[line] & is_filled for number in np.unique(shard_of).tolist()}
        positions = self._positions(chosen, sequence[line], offset[line] + within)
        self._blocks.fetch(block for number, own in positions.items() for block in self._shards[number].blocks_of(own))
        tokens, trained = np.zeros(len(slots), dtype=np.int32), np.zeros(len(slots), dtype=bool)
        for number, own in positions.items():
            shard = self._shards[number]
            tokens[chosen[number]] = shard.tokens.take(own)
            trained[chosen[number]] = True if shard.mask is None else shard.mask.take(own)
        if self.is_segmented:
            trained[(within == 0) & is_first[line]] = False
        return tokens, segments, trained

    def _positions(
        self, chosen: dict[int, np.ndarray], sequence: np.ndarray, within: np.ndarray
    ) -> dict[int, np.ndarray]:
        """Positions in the tokens of each shard; the indexes of several shards are read at once."""

        def positions_in(number: int) -> np.ndarray:
            sequences, index = np.unique(sequence[chosen[number]], return_inverse=True)
            return self._shards[number].starts(sequences)[index] + within[chosen[number]]

        return dict(zip(chosen, self._blocks.map(positions_in, chosen), strict=True))


def _shards_of(names: Iterable[str], shards: dict[str, StoredShard]) -> list[StoredShard]:
    missing = [name for name in names if name not in shards]
    assert not missing, f"the packed rows read shards that are not among those of the job: {missing[:3]}"
    return [shards[name] for name in names]
