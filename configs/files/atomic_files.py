"""Files that appear whole or not at all. Ranks, executors and infra/ use these functions: configs/ is the only package
below all of them."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` for a new file. It replaces `path` when the block ends and is removed where the block
    fails."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_durably(path: Path, data: bytes) -> None:
    """Replace a small file; what it holds survives a power cut."""
    with replacing(path) as temporary:
        write_durably(temporary, data)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in a directory."""
    sync_file(path)


def sync_file(path: Path) -> None:
    """Wait until the disk has what was written into a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """A second name of the same bytes; a copy on another file system, or on one without links."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
