"""Says in one sentence that a disk is full, whether Python, SQLite, a server or a Java process noticed it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

SIGNS = ("No space left on device", "database or disk is full")
FULL_BYTES = 16 << 20
"""Free space below which a disk counts as full: a write that failed for lack of room often leaves a little free."""


def explain_full_disk(error: BaseException, directories: Iterable[Path]) -> str:
    """One sentence with the fix where a full disk is the cause; else empty. The words of an error or of its cause show
    it; where a server failed without a word, the free space does."""
    disks: dict[int, Path] = {}
    for path in (*directories, temporary_dir()):
        if path.exists():
            disks.setdefault(path.stat().st_dev, path.absolute())
    free_bytes = {path: shutil.disk_usage(path).free for path in disks.values()}
    full = [directory for directory, free in free_bytes.items() if free < FULL_BYTES]
    if not any(map(_says_full, _causes(error))) and (not full or isinstance(error, ValueError)):
        return ""
    room = ", ".join(f"{free / 2**30:.2f} GiB under {directory}" for directory, free in free_bytes.items())
    return (
        f"no space left on {' and '.join(map(str, full)) or 'a disk'} (free: {room}): make room, then run again to "
        f"continue"
    )


def temporary_dir() -> Path:
    """Where programs keep temporary files, SQLite too. Python itself skips a directory that is full."""
    given = os.environ.get("TMPDIR", "")
    return Path(given) if given and Path(given).is_dir() else Path(tempfile.gettempdir())


def _says_full(error: BaseException) -> bool:
    return (isinstance(error, OSError) and error.errno == errno.ENOSPC) or any(sign in str(error) for sign in SIGNS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
