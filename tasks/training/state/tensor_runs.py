"""Which elements of a checkpoint's tensors a rank writes and reads, in terms that know no topology. Imports no PyTorch.

A tensor is seen as a matrix (a vector as a column). Tensor parallelism gives a rank a box of it; ZeRO and copies give
it a run of the flattened box. So what any topology wrote is found from any other: two runs overlap in rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """Rows and columns of a matrix; `stop_` is the one after the last."""

    first_row: int
    stop_row: int
    first_column: int
    stop_column: int

    @property
    def width(self) -> int:
        return self.stop_column - self.first_column

    @property
    def num_rows(self) -> int:
        return self.stop_row - self.first_row


class Run(NamedTuple):
    """Elements `start` to `start + length` of a flattened box of a tensor."""

    tensor: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    start: int
    length: int

    def offset_of(self, rectangle: Box) -> int:
        """Where the first element of a rectangle of the whole matrix is in this run."""
        row, column = rectangle.first_row - self.box.first_row, rectangle.first_column - self.box.first_column
        return row * self.box.width + column - self.start

    def rectangles(self) -> Iterator[Box]:
        """The run as rectangles of the whole matrix: a part of a row, whole rows, a part of a row."""
        width, stop = self.box.width, self.start + self.length
        position = self.start
        while position < stop:
            row, column = divmod(position, width)
            num_rows = (stop - position) // width if column == 0 else 0
            end = position + num_rows * width if num_rows else min(stop, (row + 1) * width)
            columns = (0, width) if num_rows else (column, column + end - position)
            yield Box(
                self.box.first_row + row,
                self.box.first_row + row + max(1, num_rows),
                self.box.first_column + columns[0],
                self.box.first_column + columns[1],
            )
            position = end


def matrix_of(shape: tuple[int, ...]) -> Box:
    """The whole of a tensor, seen as a matrix."""
    return Box(0, shape[0], 0, math.prod(shape[1:]))


def whole_run(tensor: str, shape: tuple[int, ...]) -> Run:
    return Run(tensor, tuple(shape), matrix_of(shape), 0, math.prod(shape))


def overlaps(run: Run, other: Run) -> Iterator[Box]:
    """Rectangles of the whole matrix that both hold."""
    for ours in run.rectangles():
        for theirs in other.rectangles():
            both = Box(
                max(ours.first_row, theirs.first_row),
                min(ours.stop_row, theirs.stop_row),
                max(ours.first_column, theirs.first_column),
                min(ours.stop_column, theirs.stop_column),
            )
            if both.num_rows > 0 and both.width > 0:
                yield both
