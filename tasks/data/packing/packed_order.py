"""The order of a phase in parts, order-00000.npy and on: one line per run of a document's tokens; read by line, never
whole. Runs in training ranks: imports only NumPy.

A line is six int32: shard, sequence, offset in the sequence, length, slot, document. Slots and documents count from
the part's first ones. packing.json says for every part how many lines and documents it has and where its slots begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from configs.files.block_reader import BlockReader
from configs.files.stored_files import StoredFile
from tasks.data.shards.stored_array import StoredArray

COLUMNS = ("shard", "sequence", "offset", "length", "slot", "document")
SLOT, DOCUMENT = COLUMNS.index("slot"), COLUMNS.index("document")
INT32 = np.dtype("<i4")
HEADER_BYTES = 128
"""Of a part, before its lines."""
ORDER_FILES = "order-*.npy"

PartCounts = dict[str, int]


def part_name(number: int) -> str:
    """The file of a part."""
    return f"order-{number:05}.npy"


def write_part(path: Path, lines: np.ndarray) -> PartCounts:
    """Write lines (COLUMNS) whose slots ascend and whose documents are numbered from 0; returns what packing.json says
    of the part."""
    first_slot = int(lines[0, SLOT])
    own = lines.copy()
    own[:, SLOT] -= first_slot
    assert own.min() >= 0 and own.max() < 2**31, (path, own.min(axis=0), own.max(axis=0))
    np.save(path, np.ascontiguousarray(own, dtype=INT32))
    assert path.stat().st_size == _num_bytes(len(lines)), path
    return {"lines": len(lines), "documents": int(lines[-1, DOCUMENT]) + 1, "first_slot": first_slot}


def _num_bytes(num_lines: int) -> int:
    return HEADER_BYTES + num_lines * len(COLUMNS) * INT32.itemsize


class PackedOrder:
    """The lines of a phase, whose slots ascend."""

    def __init__(self, files: Mapping[str, StoredFile], parts: list[PartCounts], blocks: BlockReader) -> None:
        """Raises ValueError where a part is missing or does not have the size of its lines."""
        self._blocks = blocks
        self._firsts = np.append(0, np.cumsum([part["lines"] for part in parts]))
        documents = np.cumsum([part["documents"] for part in parts])
        self._begins = np.zeros((len(parts), len(COLUMNS)), dtype=np.int64)
        self._begins[:, SLOT] = [part["first_slot"] for part in parts]
        self._begins[1:, DOCUMENT] = documents[:-1]
        self._values = []
        for number, part in enumerate(parts):
            file = files.get(part_name(number))
            if file is None or file.size != _num_bytes(part["lines"]):
                raise ValueError(
                    f"{part_name(number) if file is None else file.uri} is missing, cut short or damaged "
                    f"({0 if file is None else file.size} bytes for {part['lines']} lines): pack again"
                )
            self._values.append(StoredArray(file, blocks, INT32, HEADER_BYTES))

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def lines(self, numbers: np.ndarray) -> np.ndarray:
        """The lines of these numbers, int64 of shape (lines, COLUMNS)."""
        part = np.searchsorted(self._firsts, numbers, side="right") - 1
        return self._take(part, numbers[:, None], np.arange(len(COLUMNS))) + self._begins[part]

    def lines_at(self, slots: np.ndarray) -> np.ndarray:
        """Number of the last line whose slot is at or before each of these, by bisection in its part."""
        part = np.searchsorted(self._begins[:, SLOT], slots, side="right") - 1
        within = slots - self._begins[part, SLOT]
        first, stop = self._firsts[part], self._firsts[part + 1]
        while (first < stop).any():
            middle = np.minimum((first + stop) // 2, self._firsts[part + 1] - 1)
            is_before, is_open = self._take(part, middle, SLOT) <= within, first < stop
            first, stop = np.where(is_open & is_before, middle + 1, first), np.where(is_open & ~is_before, middle, stop)
        return first - 1

    def _take(self, part: np.ndarray, lines: np.ndarray, columns: np.ndarray | int) -> np.ndarray:
        """Values as they are stored, at lines of these parts: `part` has the first dimension of `lines`."""
        firsts = self._firsts[part].reshape((-1,) + (1,) * (lines.ndim - 1))
        positions = (lines - firsts) * len(COLUMNS) + columns
        chosen = {number: part == number for number in np.unique(part).tolist()}
        self._blocks.fetch(
            block for number, own in chosen.items() for block in self._values[number].blocks_of(positions[own].ravel())
        )
        taken = np.zeros(positions.shape, dtype=np.int64)
        for number, own in chosen.items():
            taken[own] = self._values[number].take(positions[own].ravel()).reshape(positions[own].shape)
        return taken
