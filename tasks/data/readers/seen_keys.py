"""Remembers which ids a source has had, in eight bytes each. Runs in executors: imports no Spark."""

from __future__ import annotations

import hashlib

import numpy as np

NUM_LOOSE = 1 << 18


class SeenKeys:
    """The keys so far, as 64 bits of their hash: among ten million different keys, two have the same hash with a
    probability of 3 in a million."""

    def __init__(self) -> None:
        self._loose: set[int] = set()
        self._sorted = np.empty(0, np.uint64)

    def add(self, key: str) -> bool:
        """Remember a key; True where it is new."""
        value = int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        at = int(np.searchsorted(self._sorted, np.uint64(value))) if len(self._sorted) else 0
        if value in self._loose or (at < len(self._sorted) and int(self._sorted[at]) == value):
            return False
        self._loose.add(value)
        if len(self._loose) >= NUM_LOOSE:
            self._sorted = np.sort(
                np.concatenate([self._sorted, np.fromiter(self._loose, np.uint64, len(self._loose))])
            )
            self._loose.clear()
        return True
