"""An exclusive lock between the processes of this machine: it goes with the process that holds it, however that
ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def locked(path: Path, say: Callable[[str], None], message: str) -> Iterator[None]:
    """Hold the lock of a file, made if need be; `say` gets the message where another process holds it, then the lock is
    waited for. Who holds it may remove the file: those who wait then lock a new one."""
    lock = file_lock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(message)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def file_lock(path: Path) -> FileLock:
    """The lock of a file, not held yet. A file system without flock(2) raises OSError."""
    return FileLock(path, fallback_to_soft=False, thread_local=False)
