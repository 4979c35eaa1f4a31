"""Digests of files while they are written: of the whole, and of each block, so that a reader verifies what it reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

BLOCK_BYTES = 4 * 2**20
"""Bytes that a reader fetches and verifies at once."""
DIGEST_CHARS = 32
"""Hex digits of a block's digest: 128 bits of its sha256."""


class FileDigests:
    """Digests of the bytes that `update` was given, in order."""

    def __init__(self) -> None:
        self.size = 0
        self._whole = hashlib.sha256()
        self._block = hashlib.sha256()
        self._blocks: list[str] = []

    def update(self, data: memoryview | bytes) -> None:
        """Go on with more bytes."""
        view = memoryview(data).cast("B")
        self._whole.update(view)
        while len(view):
            part = view[: BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._block.update(part)
            self.size += len(part)
            view = view[len(part) :]
            if self.size % BLOCK_BYTES == 0:
                self._end_block()

    @property
    def sha256(self) -> str:
        return self._whole.hexdigest()

    @property
    def blocks(self) -> tuple[str, ...]:
        """The digest of each block; none for a file of one block, whose digest is the whole's."""
        if self.size <= BLOCK_BYTES:
            return ()
        rest = (block_digest_of(self._block),) if self.size % BLOCK_BYTES else ()
        return (*self._blocks, *rest)

    def _end_block(self) -> None:
        self._blocks.append(block_digest_of(self._block))
        self._block = hashlib.sha256()


def block_digest_of(sha256: hashlib._Hash) -> str:
    """The first 128 bits."""
    return sha256.hexdigest()[:DIGEST_CHARS]


def digests_of(path: Path) -> FileDigests:
    """Digests of a local file."""
    digests = FileDigests()
    with open(path, "rb") as file:
        while data := file.read(BLOCK_BYTES):
            digests.update(data)
    return digests
