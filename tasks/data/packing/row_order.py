"""Shuffles any number of rows without a table: a Feistel network whose rounds are keyed by the seed. Only NumPy.

It is a bijection on the next larger power of four. A value outside the range is put through again until it is inside
(cycle walking, on average less than four times).
"""

from __future__ import annotations

import hashlib

import numpy as np

NUM_ROUNDS = 6


def shuffled_rows(rows: np.ndarray, num_rows: int, seed: int | str) -> np.ndarray:
    """The index of each row of 0..num_rows-1 in the unshuffled order, int64; depends only on seed, num_rows and row."""
    half_bits = max(1, (max(num_rows - 1, 1).bit_length() + 1) // 2)
    keys = [
        np.uint64(int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:8], "big"))
        for number in range(NUM_ROUNDS)
    ]
    values = _permute(rows.astype(np.uint64), half_bits, keys)
    while (outside := values >= np.uint64(num_rows)).any():
        values[outside] = _permute(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _permute(values: np.ndarray, half_bits: int, keys: list[np.uint64]) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix_bits(right ^ key) & mask)
    return (left << shift) | right


def mix_bits(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
