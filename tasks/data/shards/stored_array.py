"""A stored file as an array that is read by position, in verified blocks. Runs in training ranks: imports only
NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from configs.files.block_reader import BlockReader
from configs.files.stored_files import StoredFile


class StoredArray:
    """The values of a file from byte `offset` on, one dimension. None crosses the end of a block."""

    def __init__(self, file: StoredFile, blocks: BlockReader, dtype: np.dtype, offset: int = 0) -> None:
        assert offset % dtype.itemsize == 0, (file.uri, offset, dtype)
        self.file, self.dtype = file, dtype
        self._blocks, self._first = blocks, offset // dtype.itemsize
        self._per_block = file.block_bytes // dtype.itemsize

    def __len__(self) -> int:
        return self.file.size // self.dtype.itemsize - self._first

    def take(self, positions: np.ndarray) -> np.ndarray:
        """The values at these positions, in any order; fetches what is not on this machine. Raises CorruptFileError."""
        values = np.empty(len(positions), self.dtype)
        numbers, within = np.divmod(self._first + positions, self._per_block)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            data = self._blocks.block(self.file, number)
            values[chosen] = np.frombuffer(data, self.dtype, len(data) // self.dtype.itemsize)[within[chosen]]
        return values

    def blocks_of(self, positions: np.ndarray) -> Iterator[tuple[StoredFile, int]]:
        """The blocks that `take` reads."""
        for number in np.unique((self._first + positions) // self._per_block).tolist():
            yield self.file, number
