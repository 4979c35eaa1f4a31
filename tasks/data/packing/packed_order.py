"""order.npy: one line per run of a document's tokens, in the order of the phase; read by line, never whole. Runs in
training ranks: imports only NumPy."""

from __future__ import annotations

import io

import numpy as np

from configs.files.block_reader import BlockReader
from configs.files.stored_files import CorruptFileError, StoredFile
from tasks.data.shards.stored_array import StoredArray

COLUMNS = ("shard", "sequence", "offset", "length", "slot", "document")
SLOT = COLUMNS.index("slot")
INT64 = np.dtype("<i8")


class PackedOrder:
    """The lines of a phase, whose slots ascend."""

    def __init__(self, file: StoredFile, blocks: BlockReader) -> None:
        """Raises ValueError where the file is cut short or holds no lines of an order."""
        self._blocks = blocks
        try:
            start = io.BytesIO(blocks.block(file, 0))
            version = np.lib.format.read_magic(start)
            assert version == (1, 0), f"{file.uri} has version {version} of the format"
            shape, is_by_column, dtype = np.lib.format.read_array_header_1_0(start)
        except CorruptFileError:
            raise
        except ValueError as error:
            raise ValueError(f"{file.uri} is cut short or damaged ({error}): pack again") from error
        if len(shape) != 2 or shape[1] != len(COLUMNS) or dtype != INT64:
            raise ValueError(
                f"{file.uri} has shape {shape} of {dtype}, expected (pieces, {len(COLUMNS)}) of int64: pack again"
            )
        self._values = StoredArray(file, blocks, INT64, start.tell())
        if len(self._values) != shape[0] * shape[1]:
            raise ValueError(f"{file.uri} is cut short or damaged ({file.size} bytes for {shape[0]} lines): pack again")
        self._num_lines = shape[0]
        self._strides = (1, shape[0]) if is_by_column else (shape[1], 1)

    def __len__(self) -> int:
        return self._num_lines

    def lines(self, numbers: np.ndarray) -> np.ndarray:
        """The lines of these numbers, int64 of shape (lines, COLUMNS)."""
        return self._take(numbers[:, None], np.arange(len(COLUMNS)))

    def lines_at(self, slots: np.ndarray) -> np.ndarray:
        """Number of the last line whose slot is at or before each of these, by bisection."""
        first, stop = np.zeros(len(slots), np.int64), np.full(len(slots), self._num_lines)
        while (first < stop).any():
            middle = np.minimum((first + stop) // 2, self._num_lines - 1)
            is_before, is_open = self._take(middle, SLOT) <= slots, first < stop
            first, stop = np.where(is_open & is_before, middle + 1, first), np.where(is_open & ~is_before, middle, stop)
        return first - 1

    def _take(self, lines: np.ndarray, columns: np.ndarray | int) -> np.ndarray:
        positions = lines * self._strides[0] + columns * self._strides[1]
        flat = positions.ravel()
        self._blocks.fetch(self._values.blocks_of(flat))
        return self._values.take(flat).reshape(positions.shape)
