"""Bytes of a source as stored, and decompressed up to the last byte before a damage.

A decompressor that meets a damage throws away what the same call had decompressed before it. The damaged part is
therefore decompressed once more, byte by byte after what was returned already: nothing that can be read is lost. Runs
in executors: imports no Spark.
"""

from __future__ import annotations

import bz2
import hashlib
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from isal import isal_zlib

READ_BYTES = 1 << 16
"""Stored bytes read at once; Arrow reads as many."""
GZIP_MAGIC = b"\x1f\x8b\x08"
DICTIONARY_FRAME = (0x184D2A5D).to_bytes(4, "little")
"""First bytes of a web archive in zstd that brings the dictionary of its frames (IIPC's specification of .warc.zst)."""
NEEDS_DICTIONARY = (
    "its frames need the dictionary in its first frame, which is not read: unpack it (`zstd -d -D DICTIONARY`), and "
    "pack it without one"
)
XZ_MEMORY_BYTES = 256 << 20
"""Of a decompressor: `xz -9` needs 65 MB; a hostile file would ask for gigabytes."""
BROKEN: tuple[type[Exception], ...] = (OSError, zlib.error, lzma.LZMAError, cast("type[Exception]", isal_zlib.error))
"""Exceptions of decompressors; a failure of disk or network raises UnreadableSourceError before it reaches them."""


class DamagedStreamError(Exception):
    """A compressed stream is damaged or ends early here; everything before was returned."""


class HashingReader(io.BufferedIOBase):
    """A forward-only file that hashes what is read from it."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._digest = hashlib.sha256()
        self.position = 0
        """Bytes read."""
        self.broken_at: int | None = None
        """Byte of a damage after which nothing could be read."""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        return self._hashed(self._raw.read(-1 if size is None else size))

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(size)

    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._hashed(self._raw.readline(-1 if size is None else size))

    def _hashed(self, data: bytes) -> bytes:
        self._digest.update(data)
        self.position += len(data)
        return data

    def again(self, start: int) -> Iterator[bytes]:
        """Blocks of the bytes that were read already, from `start` on."""
        end = self._raw.tell()
        try:
            for at in range(start, self.position, READ_BYTES):
                self._raw.seek(at)
                yield self._raw.read(min(READ_BYTES, self.position - at))
        finally:
            self._raw.seek(end)

    def drain(self) -> None:
        """Read the rest, so that the digest is the whole file's."""
        while self.read(1 << 20):
            pass

    def hexdigest(self) -> str:
        """sha256 of what was read."""
        return self._digest.hexdigest()


class MemberReader(io.RawIOBase):
    """The members of a gzip file, or the streams of a bz2 or xz file, one after the other. `ahead` holds bytes that
    were read from `file` before."""

    def __init__(self, file: HashingReader, codec: str, ahead: bytes = b"") -> None:
        self._file, self._codec, self._input = file, codec, ahead
        self._inflate: Any = None
        self._num_given = 0
        self._saved, self._broken_at = b"", 0
        self.start = 0
        """Byte of the file at which the last member that was begun starts."""
        self.damage = ""
        """Why that member ends early; what could be read of it is returned first."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self.take(len(buffer))
        if not data and self.damage:
            self._file.broken_at = self._broken_at or self._file.position
            raise DamagedStreamError(self.damage)
        buffer[: len(data)] = data
        return len(data)

    def take(self, size: int) -> bytes:
        """At most `size` bytes of one member; none at the file's end and at a damage."""
        while not self.damage:
            if self._inflate is None and not self._begin():
                return b""
            inflate: Any = self._inflate
            needs_input = getattr(inflate, "needs_input", True)
            data = (self._input or self._file.read(READ_BYTES)) if needs_input else b""
            try:
                inflated = inflate.decompress(data, size)
            except BROKEN as error:
                self._input, self.damage = data, str(error)
                self._saved = self._careful()
                break
            self._input = getattr(inflate, "unconsumed_tail", b"") or inflate.unused_data
            self._inflate = None if inflate.eof else inflate
            self._num_given += len(inflated)
            if inflated:
                return inflated
            if not inflate.eof and needs_input and not data:
                self.damage, self._saved = f"the file ends within a {self._codec} stream", self._careful()
        inflated, self._saved = self._saved[:size], self._saved[size:]
        return inflated

    def skip_damage(self) -> None:
        """Go on at the next gzip member that begins after a damage, if there is one."""
        broken_at = self._broken_at or self._file.position
        self.damage, self._inflate, self._saved, begin = "", None, b"", 1
        while (start := self._input.find(GZIP_MAGIC, begin)) < 0:
            tail, more = self._input[begin:][-2:], self._file.read(READ_BYTES)
            self._input, begin = tail + more, 0
            if not more:
                self._input, self._file.broken_at = b"", broken_at
                return
        self._input = self._input[start:]

    def _begin(self) -> bool:
        while not self._input.lstrip(b"\0"):
            self._input = self._file.read(READ_BYTES)
            if not self._input:
                return False
        self._input = self._input.lstrip(b"\0")
        self.start, self._num_given, self._broken_at = self._file.position - len(self._input), 0, 0
        self._inflate = isal_zlib.decompressobj(31) if self._codec == "gzip" else _stream_decompressor(self._codec)
        return True

    def _careful(self) -> bytes:
        """What the damaged member holds after the bytes that were returned."""
        inflate: Any = zlib.decompressobj(31) if self._codec == "gzip" else _stream_decompressor(self._codec)
        recovered, left, near = bytearray(), self._num_given, self._file.position - 2 * READ_BYTES
        self._broken_at = self.start
        try:
            for data in _trickled(self._file.again(self.start), near - self.start):
                self._broken_at += len(data)
                while step := inflate.decompress(data, max(1, left)):
                    data = getattr(inflate, "unconsumed_tail", b"")
                    recovered += step if not left else b""
                    left -= min(left, len(step))
                    if inflate.eof:
                        return bytes(recovered)
        except BROKEN:
            pass  # where the damage is
        return bytes(recovered)


def _stream_decompressor(codec: str) -> bz2.BZ2Decompressor | lzma.LZMADecompressor:
    return bz2.BZ2Decompressor() if codec == "bz2" else lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY_BYTES)


class ZstdReader(io.RawIOBase):
    """The frames of a zstd file. Arrow continues from one to the next, limits what one read inflates, and raises where
    the last one is cut."""

    def __init__(self, file: HashingReader) -> None:
        self._file, self._num_given = file, 0
        self._saved: bytes | None = None
        self._damage = ""
        self._stream = _zstd_stream(file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if self._saved is None:
            try:
                data = self._stream.read(len(buffer))
                self._num_given += len(data)
            except OSError as error:
                has_dictionary = next(self._file.again(0), b"").startswith(DICTIONARY_FRAME)
                self._damage, self._saved = NEEDS_DICTIONARY if has_dictionary else str(error), self._careful()
        if self._saved is not None:
            if not self._saved:
                raise DamagedStreamError(self._damage)
            data, self._saved = self._saved[: len(buffer)], self._saved[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)

    def _careful(self) -> bytes:
        recovered, left = bytearray(), self._num_given
        file = _BlockFile(_trickled(self._file.again(0), self._file.position - READ_BYTES))
        stream = _zstd_stream(file)
        try:
            while left:
                left -= len(stream.read(min(left, READ_BYTES)))
            while byte := stream.read(1):
                recovered += byte
        except OSError:
            pass  # where the damage is
        self._file.broken_at = file.position
        return bytes(recovered)


class _BlockFile(io.RawIOBase):
    """Blocks as a file whose reads return one block each."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self.position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = next(self._blocks, b"")
        assert len(data) <= len(buffer), len(buffer)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def _trickled(blocks: Iterator[bytes], near: int) -> Iterator[bytes]:
    """Whole blocks up to `near`, then single bytes, so that a decompressor returns what it has before it gets the byte
    that it refuses."""
    position = 0
    for block in blocks:
        step = len(block) if position + len(block) <= near else 1
        yield from (block[at : at + step] for at in range(0, len(block), step))
        position += len(block)


def _zstd_stream(file: HashingReader | _BlockFile) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
