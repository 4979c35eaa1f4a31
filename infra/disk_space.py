"""Says in one sentence that a disk is full, whether Python, SQLite, a server or a Java process noticed it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
QUOTA = "Disk quota exceeded"
SIGNS = ("No space left on device", QUOTA, "database or disk is full")
FULL_BYTES = 16 << 20
"""Free space below which a disk counts as full: a write that failed for lack of room often leaves a little free."""


def explain_full_disk(error: BaseException, directories: Iterable[Path]) -> str:
    """One sentence with the fix where a full disk is the cause; else empty. The words of an error or of its cause show
    it; where a server failed without a word, the free space does."""
    causes, disks = list(_causes(error)), {}
    is_said = any(map(_says_full, causes))
    for path in (*directories, *(_named(causes) if is_said else ()), temporary_dir()):
        if path.exists():
            disks.setdefault(path.stat().st_dev, path.absolute())
    free_bytes = {path: shutil.disk_usage(path).free for path in disks.values()}
    full = [directory for directory, free in free_bytes.items() if free < FULL_BYTES]
    if not is_said and (not full or isinstance(error, ValueError)):
        return ""
    room = ", ".join(f"{free / 2**30:.2f} GiB under {directory}" for directory, free in free_bytes.items())
    where = f"no space left on {' and '.join(map(str, full)) or 'a disk'}"
    if not full and any(QUOTA in str(cause) for cause in causes):
        where = "the disk quota of this user is used up"
    return f"{where} (free: {room}): make room, then run again to continue"


def temporary_dir() -> Path:
    """Where programs keep temporary files, SQLite too. Python itself skips a directory that is full."""
    given = os.environ.get("TMPDIR", "")
    return Path(given) if given and Path(given).is_dir() else Path(tempfile.gettempdir())


def _named(causes: Iterable[BaseException]) -> Iterator[Path]:
    """The directories of files that the errors name."""
    for cause in causes:
        if isinstance(cause, OSError):
            names = (cause.filename, cause.filename2)
            yield from (Path(name).absolute().parent for name in names if isinstance(name, str) and name)


def _says_full(error: BaseException) -> bool:
    return (isinstance(error, OSError) and error.errno in NO_ROOM) or any(sign in str(error) for sign in SIGNS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
