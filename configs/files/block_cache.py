"""Blocks of objects in S3 on this machine's disk, shared by its processes.

A block is named by its file's sha256 and its number, so it is the same in every store. Its digest is verified when a
process first uses it: a block that was damaged, or cut by a power failure, is fetched again. The blocks that were used
least recently go when there is no room.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

from configs.files.atomic_files import replacing
from configs.files.file_digests import BLOCK_BYTES
from configs.files.stored_files import StoredFile, read_block

NUM_LOCKS = 256
"""Blocks that the processes of this machine fetch at once, at most."""
KEPT_SHARE = 0.9
"""Of the bound, what stays when blocks are removed: a look at all of them makes room for many."""
MIN_BYTES = 64 * BLOCK_BYTES
"""With less, the blocks of one step remove each other."""
LOCKS_DIR, TOTAL_FILE = "locks", "total"


class BlockCache:
    """At most `max_bytes` of blocks in a directory, for any number of processes and threads."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._blocks_dir, self._locks_dir, self._max_bytes = directory / "blocks", directory / LOCKS_DIR, max_bytes
        for each in (self._blocks_dir, self._locks_dir):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._verified: dict[str, int] = {}
        """Inode of each block whose digest this process has seen."""

    def has(self, file: StoredFile, number: int) -> bool:
        """Whether `read` needs no request, as far as a look at its name shows."""
        return (self._blocks_dir / _name(file, number)).exists()

    def read(self, file: StoredFile, number: int) -> bytes | mmap.mmap:
        """The bytes of a block, which stay readable when the cache removes it. Raises CorruptFileError."""
        name = _name(file, number)
        held = self._held(file, number, name)
        if held is not None:
            return held
        with _locked(self._locks_dir / str(crc32(name.encode()) % NUM_LOCKS)):
            held = self._held(file, number, name)  # another process may have fetched it meanwhile
            if held is not None:
                return held
            data = read_block(file, number, None)
            self._keep(name, data)
            return data

    def _held(self, file: StoredFile, number: int, name: str) -> mmap.mmap | None:
        begin, end = file.bounds(number)
        try:
            with open(self._blocks_dir / name, "rb") as block:
                status = os.fstat(block.fileno())
                if status.st_size != end - begin:
                    return None
                os.utime(block.fileno())
                mapped = mmap.mmap(block.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return None
        if self._verified.get(name) != status.st_ino:
            if not file.is_intact(number, memoryview(mapped)):
                return None
            self._verified[name] = status.st_ino
        return mapped

    def _keep(self, name: str, data: bytes) -> None:
        """Write a block. The total is raised before, so that a process that is killed here leaves it too high and never
        too low; the next removal counts again."""
        if len(data) > self._max_bytes:
            return
        with _locked(self._locks_dir / TOTAL_FILE) as descriptor:
            known = os.pread(descriptor, 20, 0)
            total = int(known) + len(data) if known else self._max_bytes + 1
            if total > self._max_bytes:
                room = min(self._max_bytes - len(data), int(KEPT_SHARE * self._max_bytes))
                total = self._remove_oldest(room) + len(data)
            os.pwrite(descriptor, b"%20d" % total, 0)
            with replacing(self._blocks_dir / name) as temporary:
                temporary.write_bytes(data)

    def _remove_oldest(self, max_bytes: int) -> int:
        """Remove blocks until no more than `max_bytes` are left, and what killed processes left; returns the bytes that
        stay. Blocks are written one at a time, so nobody writes now."""
        blocks: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self._blocks_dir):
            if entry.name.startswith("."):
                os.unlink(entry.path)
            else:
                blocks.append((entry.stat().st_mtime, entry.stat().st_size, Path(entry.path)))
        total = sum(size for _, size, _ in blocks)
        for _, size, path in sorted(blocks):
            if total <= max_bytes:
                break
            path.unlink()
            total -= size
        return total


def node_cache() -> BlockCache:
    """The cache of this machine and user below the directory for temporary files (TMPDIR). It takes at most half of the
    disk space that nothing else uses. Raises ValueError where that is less than a step needs."""
    directory = Path(tempfile.gettempdir()) / f"glm46-blocks-{os.getuid()}"
    directory.mkdir(exist_ok=True, mode=0o700)
    total = directory / LOCKS_DIR / TOTAL_FILE
    own = int(total.read_text() or 0) if total.exists() else 0
    max_bytes = (shutil.disk_usage(directory).free + own) // 2
    if max_bytes < MIN_BYTES:
        raise ValueError(
            f"{directory} may keep {max_bytes} bytes of blocks from S3, half of what its disk has free; training needs "
            f"{MIN_BYTES}: set TMPDIR to a disk with more room"
        )
    return BlockCache(directory, max_bytes)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Hold the lock of a file, against other processes and other threads; gives its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _name(file: StoredFile, number: int) -> str:
    return f"{file.sha256}-{number}"
