"""Counts the bytes of stored files that one process reads and writes while it runs a step.

The step's own process counts, as evidence that it is no bottleneck. Executors and ranks are other processes: what they
read and write is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Transferred:
    """Bytes of stored files."""

    read: int = 0
    written: int = 0


_counting: ContextVar[Transferred | None] = ContextVar("transferred bytes", default=None)


@contextmanager
def counting_bytes() -> Iterator[Transferred]:
    """Count what this thread reads and writes inside the block."""
    counted = Transferred()
    token = _counting.set(counted)
    try:
        yield counted
    finally:
        _counting.reset(token)


def count_read(num_bytes: int) -> None:
    """Add bytes of a stored file that were read."""
    if (counted := _counting.get()) is not None:
        counted.read += num_bytes


def count_written(num_bytes: int) -> None:
    """Add bytes of a file that were written to the store."""
    if (counted := _counting.get()) is not None:
        counted.written += num_bytes
