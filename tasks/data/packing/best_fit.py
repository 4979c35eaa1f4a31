"""Best-fit-decreasing packing over the histogram of lengths.

Its cost grows with the number of different lengths, not of pieces. Longest first, each length goes into the rows with
the least room that still holds it; rows of equal room are moved together. Pieces of one length then take their slots
in the order in which they are given.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowShape:
    """Rows that hold pieces of the same lengths."""

    lengths: tuple[int, ...]
    """Descending."""
    count: int


def row_shapes(lengths: np.ndarray, capacity: int) -> list[RowShape]:
    """The shapes of the rows that pieces of these lengths (1 to `capacity`) fill, fullest first."""
    counts = np.bincount(lengths, minlength=capacity + 1)
    assert counts[0] == 0 and len(counts) == capacity + 1, (int(lengths.min()), int(lengths.max()), capacity)
    by_room: dict[int, list[RowShape]] = {}
    rooms: list[int] = []
    for length in np.flatnonzero(counts)[::-1].tolist():
        waiting = int(counts[length])
        while waiting:
            index = bisect_left(rooms, length)
            is_new = index == len(rooms)
            room = capacity if is_new else rooms[index]
            per_row = min(room // length, waiting)
            shape = RowShape((), waiting // per_row) if is_new else by_room[room].pop()
            count = min(shape.count, waiting // per_row)
            waiting -= count * per_row
            if count < shape.count:
                by_room[room].append(RowShape(shape.lengths, shape.count - count))
            elif not is_new and not by_room[room]:
                del by_room[room], rooms[index]
            left = room - length * per_row
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(RowShape(shape.lengths + (length,) * per_row, count))
    return [shape for room in rooms for shape in by_room[room]]


def num_rows(shapes: list[RowShape]) -> int:
    """Number of rows of all shapes."""
    return sum(shape.count for shape in shapes)


def place_pieces(lengths: np.ndarray, shapes: list[RowShape], capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(piece, slot) in the order of slots: the pieces and the slots at which they begin, in rows of `capacity` slots in
    the order of the shapes."""
    by_length = np.argsort(lengths, kind="stable")
    taken = np.searchsorted(lengths[by_length], np.arange(capacity + 2))
    pieces, slots = [], []
    first_row = 0
    for shape in shapes:
        starts = (first_row + np.arange(shape.count)) * capacity
        within = 0
        for length in shape.lengths:
            pieces.append(by_length[taken[length] : taken[length] + shape.count])
            slots.append(starts + within)
            taken[length] += shape.count
            within += length
        first_row += shape.count
    piece, slot = np.concatenate(pieces), np.concatenate(slots)
    order = np.argsort(slot, kind="stable")
    return piece[order], slot[order]
