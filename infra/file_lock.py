"""An exclusive lock between the processes of this machine: it is released when the process that holds it ends, however
it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def locked(path: Path, say: Callable[[str], None], message: str) -> Iterator[None]:
    """Hold the lock of a file, made if needed. Where another process holds it, `say` gets the message, and the call
    waits. The holder may remove the file: those who wait then lock a new one."""
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
