"""Runs of texts are where a text crosses a multiple of the chunk's size."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.data.text.text_chunks import chunk_bounds


def bounds_by_hand(sizes: list[int], chunk_size: int) -> list[tuple[int, int]]:
    runs: dict[int, list[int]] = {}
    for number in range(len(sizes)):
        runs.setdefault(sum(sizes[: number + 1]) // chunk_size, []).append(number)
    return [(run[0], run[-1] + 1) for run in runs.values()]


@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_those_of_running_sums(seed):
    sizes = np.random.default_rng(seed).integers(0, 30, seed * 3)
    assert chunk_bounds(sizes, 50) == bounds_by_hand(sizes.tolist(), 50)
    assert all(sizes[start:stop].sum() < 50 + 30 for start, stop in chunk_bounds(sizes, 50))
