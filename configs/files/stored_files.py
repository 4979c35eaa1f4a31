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

NUM_CACHED_BLOCKS = 4


class CorruptFileError(ValueError):
    """A file whose bytes are not the committed ones."""

    def __init__(self, uri: str, problem: str) -> None:
        super().__init__(f"{uri} is corrupt: {problem}. Run again: the step that made it is computed anew")


@dataclass(frozen=True)
class StoredFile:
    """Where a file is and what it holds."""

    uri: str
    size: int
    """Bytes."""
    sha256: str
    """Of the whole; "" where nobody knows it (a file of a user): nothing is verified."""
    blocks: tuple[str, ...] = ()
    """Digest of each block of BLOCK_BYTES; none where the file is verified as a whole."""

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.uri.rpartition("/")[2]

    @property
    def directory(self) -> str:
        return self.uri.rpartition("/")[0]


def given_file(path: Path) -> StoredFile:
    """A local file that no manifest describes."""
    return StoredFile(str(path.absolute()), path.stat().st_size, "")


class VerifiedReader(io.RawIOBase):
    """A stored file, read by position. Every block is verified before its bytes are given out; raises
    CorruptFileError."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._position = 0
        self._block_bytes = BLOCK_BYTES if file.blocks or not file.sha256 else max(file.size, 1)
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
            number, begin = divmod(self._position, self._block_bytes)
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
            begin = number * self._block_bytes
            data = self._read(begin, min(begin + self._block_bytes, self._file.size))
            self._verify(number, data)
            self._blocks[number] = data
            if len(self._blocks) > NUM_CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]

    def _read(self, begin: int, end: int) -> bytes:
        if self._descriptor is not None:
            data = os.pread(self._descriptor, end - begin, begin)
        else:
            with _missing_is_corrupt(self._file):
                data = read_range(self._file.uri, begin, end)
        if len(data) != end - begin:
            raise CorruptFileError(self._file.uri, f"it ends at byte {begin + len(data)} of {self._file.size}")
        return data

    def _verify(self, number: int, data: bytes) -> None:
        if not self._file.sha256:
            return
        digest = hashlib.sha256(data)
        if self._file.blocks:
            is_whole = block_digest_of(digest) == self._file.blocks[number]
        else:
            is_whole = digest.hexdigest() == self._file.sha256
        if not is_whole:
            raise CorruptFileError(self._file.uri, f"the block at byte {number * self._block_bytes} has another digest")


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
    written.append(StoredFile(uri, writer.digests.size, writer.digests.sha256, writer.digests.blocks))


@cache
def local_copy(file: StoredFile) -> str:
    """Path of a verified local copy: the file itself where it is local. Processes of this machine share a copy."""
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
