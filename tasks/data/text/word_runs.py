"""Hashes of runs of words in a batch of texts. Runs in executors: imports no Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tasks.data.text.words import Words, base_powers, mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

NO_STARTS = np.empty(0, dtype=np.int64)


class Runs:
    """Hashes of runs of words in a batch, equal for equal runs at any position: differences of one running sum of
    powers."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.owners = np.repeat(np.arange(len(words.counts)), words.counts)
        self._powers, self._inverses = base_powers(len(words.hashes) + 1)
        self._sums = np.zeros(len(words.hashes) + 1, dtype=np.uint64)
        np.cumsum(words.hashes * self._powers[:-1], out=self._sums[1:])

    def starts(self, size: int) -> I64:
        """First words of every run of `size` words of one text."""
        return (
            np.flatnonzero(self.owners[size - 1 :] == self.owners[: len(self.owners) - size + 1])
            if len(self.owners) >= size
            else NO_STARTS
        )

    def hashes(self, starts: I64, lengths: I64 | int) -> U64:
        return mix((self._sums[starts + lengths] - self._sums[starts]) * self._inverses[starts])
