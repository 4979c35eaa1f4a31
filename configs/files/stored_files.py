"""Committed files by address, size and digests: read in verified blocks and written once, from any process.

An address is an absolute path or s3://bucket/key. The driver passes StoredFile values to executors and ranks; the bytes
go directly between them and the store.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.files.atomic_files import replacing
from configs.files.file_digests import BLOCK_BYTES, FileDigests, block_digest_of, digests_of
from configs.files.s3_objects import S3, download, read_range, upload
from configs.files.transferred_bytes import count_read, count_written

NUM_CACHED_BLOCKS = 4


class CorruptFileError(ValueError):
    """A file whose bytes are not the committed ones."""

    def __init__(self, uri: str, problem: str) -> None:
        super().__init__(f"{uri} is corrupt: {problem}. Run again: the step that made it is computed anew")
        self.problem = problem


@dataclass(frozen=True)
class StoredFile:
    """Where a file is and what it holds."""

    uri: str
    size: int
    """Bytes."""
    sha256: str
    """Of the whole, or of the blocks' digests where only those were taken; "" where nobody knows it (a file of a user):
    nothing is verified."""
    blocks: tuple[str, ...] = ()
    """Digest of each block of BLOCK_BYTES; none where the file is verified as a whole."""

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.uri.rpartition("/")[2]

    @property
    def directory(self) -> str:
        return self.uri.rpartition("/")[0]

    @property
    def block_bytes(self) -> int:
        """Bytes that are read and verified at once."""
        return BLOCK_BYTES if self.blocks or not self.sha256 else max(self.size, 1)

    def bounds(self, number: int) -> tuple[int, int]:
        """First byte of a block, and the one after its last."""
        return number * self.block_bytes, min((number + 1) * self.block_bytes, self.size)

    def is_intact(self, number: int, data: bytes | memoryview) -> bool:
        """Whether these bytes have the digest of a block."""
        if not self.sha256:
            return True
        digest = hashlib.sha256(data)
        return block_digest_of(digest) == self.blocks[number] if self.blocks else digest.hexdigest() == self.sha256


def read_block(file: StoredFile, number: int, descriptor: int | None) -> bytes:
    """Fetch and verify one block, of a local file by its descriptor. Raises CorruptFileError."""
    begin, end = file.bounds(number)
    with _missing_is_corrupt(file):
        data = read_range(file.uri, begin, end) if descriptor is None else os.pread(descriptor, end - begin, begin)
    if len(data) != end - begin:
        raise CorruptFileError(file.uri, f"it ends at byte {begin + len(data)} of {file.size}")
    if not file.is_intact(number, data):
        raise CorruptFileError(file.uri, f"the block at byte {begin} has another digest")
    count_read(len(data))
    return data


def given_file(path: Path) -> StoredFile:
    """A local file that no manifest describes."""
    return StoredFile(str(path.absolute()), path.stat().st_size, "")


class VerifiedReader(io.RawIOBase):
    """A stored file, read by position. Every block is verified before its bytes are given out; raises
    CorruptFileError."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._position = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        with _missing_is_corrupt(file):
            self._descriptor = None if file.uri.startswith(S3) else os.open(file.uri, os.O_RDONLY)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view, given = memoryview(buffer).cast("B"), 0
        while given < len(view) and self._position < self._file.size:
            number, begin = divmod(self._position, self._file.block_bytes)
            part = self._block(number)[begin : begin + len(view) - given]
            view[given : given + len(part)] = part
            given += len(part)
            self._position += len(part)
        return given

    def close(self) -> None:
        if self._descriptor is not None and not self.closed:
            os.close(self._descriptor)
        super().close()

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            self._blocks[number] = read_block(self._file, number, self._descriptor)
            if len(self._blocks) > NUM_CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]


class DigestingWriter(io.RawIOBase):
    """A forward-only file whose digests are known when its last byte is written."""

    def __init__(self, raw: io.BufferedWriter) -> None:
        self._raw = raw
        self.digests = FileDigests()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.digests.size

    def write(self, data: Any, /) -> int:
        self.digests.update(data)
        return self._raw.write(data)


@contextmanager
def writing(uri: str) -> Iterator[tuple[DigestingWriter, list[StoredFile]]]:
    """A file to write in order, and a list that has its StoredFile after the block. A reader sees all of it or nothing;
    a second writer of the same bytes replaces the first."""
    written: list[StoredFile] = []
    if uri.startswith(S3):
        with tempfile.TemporaryDirectory(prefix="glm46-upload-") as directory:
            path = Path(directory) / "file"
            yield from _written(path, uri, written)
            upload(path, uri)
    else:
        os.makedirs(os.path.dirname(uri), exist_ok=True)
        with replacing(Path(uri)) as temporary:
            yield from _written(temporary, uri, written)


def _written(path: Path, uri: str, written: list[StoredFile]) -> Iterator[tuple[DigestingWriter, list[StoredFile]]]:
    with open(path, "wb") as raw:
        writer = DigestingWriter(raw)
        yield writer, written
        raw.flush()
        os.fsync(raw.fileno())
    count_written(writer.digests.size)
    written.append(StoredFile(uri, writer.digests.size, writer.digests.sha256, writer.digests.blocks))


@cache
def local_copy(file: StoredFile) -> str:
    """Path of a verified local copy: the file itself where it is local. Processes of this machine share a copy."""
    count_read(file.size)
    path = Path(file.uri)
    if file.uri.startswith(S3):
        path = Path(tempfile.gettempdir()) / f"glm46-copies-{os.getuid()}" / file.sha256 / file.name
        if not (path.is_file() and digests_of(path).sha256 == file.sha256):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacing(path) as temporary:
                with _missing_is_corrupt(file):
                    download(file.uri, temporary)
                _verify_whole(temporary, file)
    else:
        with _missing_is_corrupt(file):
            _verify_whole(path, file)
    return str(path)


@contextmanager
def _missing_is_corrupt(file: StoredFile) -> Iterator[None]:
    """A committed file that somebody removed; a user's own stays missing."""
    try:
        yield
    except FileNotFoundError as error:
        if not file.sha256:
            raise
        raise CorruptFileError(file.uri, "it was removed") from error


def _verify_whole(path: Path, file: StoredFile) -> None:
    if file.sha256 and digests_of(path).sha256 != file.sha256:
        raise CorruptFileError(file.uri, "its sha256 is another")
