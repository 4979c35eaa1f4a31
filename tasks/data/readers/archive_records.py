"""Splits web archives (WARC, ARC; plain or gzip) into their records. Runs in executors: imports no Spark.

A record's position is its byte in the file as stored. In a compressed file, that is the byte of its gzip member: the
offset of CDX indexes. (In a file in zstd, bz2 or xz, whose frames hold anything, it is the record's byte after
decompression.) Where several records share one member, the later ones are named by the member in the source and by
their byte in it. A record whose length is wrong, or a damaged member, costs only that record: reading goes on at the
next header or member. FastWARC reads whole archives in half the time and gives the same bodies, but it ends at the
first damage, gives bodies of a wrong length as if they were whole, and reads no ARC
(benchmarks/data/archive_bodies.py).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tasks.data.readers.source_bytes import GARBLED, codec_of, decompressed
from tasks.data.readers.stored_streams import GZIP_MAGIC, READ_BYTES, HashingReader, MemberReader

INFLATED_BYTES = 1 << 18
MAX_HEADER_BYTES = 1 << 16
MAX_ARC_LINE = 1 << 12
WARC_START = b"WARC/"
LENGTH = re.compile(rb"\d{1,18}")
"""A length in bytes; a longer number is that of no record."""
ARC_LINE = re.compile(
    rb"(?=[^\r\n]* " + LENGTH.pattern + rb"\r?\n)"
    rb"[a-zA-Z][\w.+-]*:[^\r\n]* [\d.:a-fA-F]* \d{8,14} [^\r\n]*\r?\n"
)
"""URL, IP address, date, and what version 1 and 2 have in between, with the length last."""

NEXT_WARC = re.compile(rb"\r?\n\r?\nWARC/[01]\.")
NEXT_ARC = re.compile(rb"\n(?=" + ARC_LINE.pattern + rb")")
"""Ends of a record whose stated length is too large."""
HEADER_LINE = re.compile(rb"^([\w-]+)[ \t]*:[ \t]*([^\r\n]*)", re.M)


@dataclass(frozen=True)
class ArchiveRecord:
    """One record, or (with a reason) the address of one that was not read."""

    member: int
    """Byte at which its gzip member begins, or, in any other file, the record itself."""
    inside: int
    """Decompressed bytes of the member before the record."""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    """Headers by lower-case names; url and content-length in an ARC file."""
    block: bytes = b""
    reason: str = ""
    detail: str = ""


class ArchiveBytes:
    """The decompressed bytes ahead, with the addresses of the gzip members that hold them."""

    def __init__(self, name: str, file: HashingReader) -> None:
        self._stream = decompressed(name, file) if codec_of(name) in ("bz2", "xz", "zstd") else file
        self._file, self._damage = file, ""
        self._raw = self._read()
        self._members = (
            MemberReader(file, "gzip", self._raw) if self._raw.startswith(GZIP_MAGIC) and self._stream is file else None
        )
        self.codec = "gzip" if self._members else codec_of(name)
        self._starts: list[tuple[int, int]] = []
        self._end = 0
        self.buffer = bytearray()
        self.position = 0
        """Decompressed bytes before the buffer."""

    @property
    def damage(self) -> str:
        """Why the member being read ends early; what comes before the break is returned first."""
        return self._members.damage if self._members else self._damage

    def fill(self, size: int) -> bool:
        """Fill the buffer to at least `size` bytes; False where the file ends or is damaged before that."""
        while len(self.buffer) < size:
            block = self._next_block()
            if not block:
                return False
            self.buffer += block
            self._end += len(block)
        return True

    def drop(self, size: int) -> None:
        """Drop `size` bytes of the buffer."""
        del self.buffer[:size]
        self.position += size

    def skip(self, size: int, end: re.Pattern[bytes]) -> tuple[int, bool]:
        """Skip `size` bytes without holding them, or the bytes before an earlier match of `end`; (bytes skipped,
        whether `end` matched)."""
        left = size
        while left and self.fill(1):
            has_more = self.fill(INFLATED_BYTES)
            match = end.search(self.buffer)
            if match is not None and match.start() < left:
                self.drop(match.start())
                return size - left + match.start(), True
            # What ends the record may begin in the tail: it is looked at again with what follows.
            step = min(left, len(self.buffer) - MAX_ARC_LINE if has_more else len(self.buffer))
            self.drop(step)
            left -= step
        return size - left, False

    def address(self) -> tuple[int, int]:
        """(member, inside) of the buffer's first byte."""
        if self._members is None:
            return self.position, 0
        while len(self._starts) > 1 and self._starts[1][0] <= self.position:
            self._starts.pop(0)
        start, stored = self._starts[0]
        return stored, self.position - start

    def next_member(self) -> None:
        """Go on at the member after a damaged one, when the buffer holds nothing more of it."""
        self._damage = ""
        if self._members:
            self._members.skip_damage()

    def _next_block(self) -> bytes:
        if self._members is None:
            block, self._raw = self._raw or self._read(), b""
            return block
        block = self._members.take(INFLATED_BYTES)
        if not self._starts or self._starts[-1][1] != self._members.start:
            self._starts.append((self._end, self._members.start))
        return block

    def _read(self) -> bytes:
        try:
            return self._stream.read1(READ_BYTES)
        except GARBLED as error:
            self._damage, self._stream = str(error), io.BytesIO()
            return b""


def archive_records(name: str, file: HashingReader, max_record_bytes: int) -> Iterator[ArchiveRecord]:
    """Every record of a WARC or ARC file in its order."""
    source = ArchiveBytes(name, file)
    while _at_record(source) or source.damage:
        address = source.address()
        record = _next_record(source, address, max_record_bytes) if source.buffer else ArchiveRecord(*address)
        if not _at_record(source) and source.damage:
            # In a damaged member, the last record is damaged; records before it in the same member are whole.
            member, _ = source.address()
            if record.reason or not record.headers or address == (member, 0):
                record = replace(record, block=b"", reason=f"truncated_{source.codec}", detail=source.damage)
                source.next_member()
        yield record


def _at_record(source: ArchiveBytes) -> bool:
    """Drop the line ends between records; False at the file's end."""
    while source.fill(1):
        if source.buffer[0] not in b"\r\n":
            return True
        source.drop(1)
    return False


def _next_record(source: ArchiveBytes, address: tuple[int, int], max_record_bytes: int) -> ArchiveRecord:
    headers, size, problem = _read_header(source)
    if problem:
        skipped = _find_next(source)
        return ArchiveRecord(*address, headers, reason="broken_record", detail=f"{problem}; {skipped} bytes skipped")
    length = int(headers[b"content-length"])
    if length > max_record_bytes:
        source.drop(size)
        num_skipped, is_wrong = source.skip(length, NEXT_ARC if b"url" in headers else NEXT_WARC)
        if is_wrong:
            detail = f"content-length is {length}, the next record begins {num_skipped} bytes after the header"
            return ArchiveRecord(*address, headers, reason="wrong_content_length", detail=detail)
        cut = "" if num_skipped == length else f", of which the file has {num_skipped}"
        detail = f"{length} bytes{cut}, ingest.max_record_bytes is {max_record_bytes}"
        return ArchiveRecord(*address, headers, reason="record_too_long", detail=detail)
    is_whole = source.fill(size + length + 1) or len(source.buffer) == size + length
    if is_whole and (len(source.buffer) == size + length or source.buffer[size + length] in b"\r\n"):
        block = bytes(memoryview(source.buffer)[size : size + length])
        source.drop(size + length)
        return ArchiveRecord(*address, headers, block)
    source.drop(size)
    num_left = len(source.buffer)
    skipped = _find_next(source)
    if not is_whole and skipped == num_left:
        return ArchiveRecord(
            *address, headers, reason="truncated_record", detail=f"{num_left} of {length} bytes are there"
        )
    detail = f"content-length is {length}, the next record begins {skipped} bytes after the header"
    return ArchiveRecord(*address, headers, reason="wrong_content_length", detail=detail)


def _read_header(source: ArchiveBytes) -> tuple[dict[bytes, bytes], int, str]:
    """(headers, bytes, problem) of the record at the buffer's start."""
    if not source.fill(len(WARC_START)) or not source.buffer.startswith(WARC_START):
        return _read_arc_line(source)
    end = width = 0
    for size in (MAX_ARC_LINE, MAX_HEADER_BYTES):
        source.fill(size)
        ends = [(at, len(mark)) for mark in (b"\r\n\r\n", b"\n\n") if (at := source.buffer.find(mark, 0, size)) >= 0]
        if ends:
            end, width = min(ends)
            break
    if not end:
        return {}, 0, f"no end of the header in {MAX_HEADER_BYTES} bytes"
    headers = {name.lower(): value.rstrip() for name, value in reversed(HEADER_LINE.findall(source.buffer, 0, end))}
    length = headers.get(b"content-length", b"missing")
    if not LENGTH.fullmatch(length):
        return headers, 0, f"content-length is {length[:40].decode('latin-1')}"
    return headers, end + width, ""


def _read_arc_line(source: ArchiveBytes) -> tuple[dict[bytes, bytes], int, str]:
    source.fill(MAX_ARC_LINE)
    line = ARC_LINE.match(source.buffer)
    if line is None:
        start = bytes(source.buffer[:40]).decode("latin-1")
        return {}, 0, f"neither a WARC nor an ARC header: {start!r}"
    fields = line[0].split()
    return {b"url": fields[0], b"content-length": fields[-1]}, line.end(), ""


def _find_next(source: ArchiveBytes) -> int:
    """Drop the bytes before the next header, and return their number; without a header everything is dropped."""
    skipped = 0
    while True:
        has_more = source.fill(MAX_HEADER_BYTES)
        start = _header_at(source.buffer)
        if start >= 0:
            source.drop(start)
            return skipped + start
        # A header may begin in the tail: it is looked at again with what follows.
        step = len(source.buffer) - MAX_ARC_LINE if has_more else len(source.buffer)
        source.drop(step)
        skipped += step
        if not has_more:
            return skipped


def _header_at(buffer: bytearray) -> int:
    """The index of the first header after a line end; -1 for none."""
    at = buffer.find(b"\n" + WARC_START)
    line = NEXT_ARC.search(buffer, 0, len(buffer) if at < 0 else at + 1)
    starts = [index + 1 for index in (at, -1 if line is None else line.start()) if index >= 0]
    return min(starts, default=-1)
