"""Splits web archives (WARC, ARC; plain or gzip) into their records. Runs in executors: imports no Spark.

A record's position is its byte in the file as stored. In a compressed file, that is the byte of its gzip member: the
offset of CDX indexes. (In a file in zstd or bz2, whose frames hold anything, it is the record's byte after
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
ARC_LINE = re.compile(rb"(?=[^\r\n]*\d\r?\n)[a-zA-Z][\w.+-]*:[^\r\n]* [\d.:a-fA-F]* \d{8,14} [^\r\n]*\r?\n")
"""URL, IP address, date, and what version 1 and 2 have in between, with the length last."""

NEXT_WARC = re.compile(rb"\r?\n\r?\nWARC/[01]\.")
NEXT_ARC = re.compile(rb"\n(?=" + ARC_LINE.pattern + rb")")
"""What ends a record whose length leads behind it."""
HEADER_LINE = re.compile(rb"^([\w-]+)[ \t]*:[ \t]*([^\r\n]*)", re.M)


@dataclass(frozen=True)
class ArchiveRecord:
    """One record, or (with a reason) the place of one that was not read."""

    member: int
    """Byte of its gzip member, or of the record itself in any other file."""
    inside: int
    """Bytes of the member that stand before it, decompressed."""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    """By lower-case names; of an ARC file url and content-length."""
    block: bytes = b""
    reason: str = ""
    detail: str = ""


class ArchiveBytes:
    """The decompressed bytes ahead, with the places of the gzip members that they came from."""

    def __init__(self, name: str, file: HashingReader) -> None:
        self._stream = decompressed(name, file) if codec_of(name) in ("bz2", "zstd") else file
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
        """Of the buffer's first byte among all decompressed ones."""

    @property
    def damage(self) -> str:
        """Why the member being read ends early; what stands before the break is served first."""
        return self._members.damage if self._members else self._damage

    def fill(self, size: int) -> bool:
        """Hold at least so many bytes; False where there are no more before the file's end or a damage."""
        while len(self.buffer) < size:
            found = self._next_block()
            if not found:
                return False
            self.buffer += found
            self._end += len(found)
        return True

    def drop(self, size: int) -> None:
        """Go on behind so many bytes that were filled."""
        del self.buffer[:size]
        self.position += size

    def skip(self, size: int, end: re.Pattern[bytes]) -> tuple[int, bool]:
        """Go on behind so many bytes without holding them, or to where `end` is found before; gives their number and
        whether it was."""
        left = size
        while left and self.fill(1):
            has_more = self.fill(INFLATED_BYTES)
            found = end.search(self.buffer)
            if found is not None and found.start() < left:
                self.drop(found.start())
                return size - left + found.start(), True
            # What ends the record may begin in the tail: it is looked at again with what follows.
            step = min(left, len(self.buffer) - MAX_ARC_LINE if has_more else len(self.buffer))
            self.drop(step)
            left -= step
        return size - left, False

    def place(self) -> tuple[int, int]:
        """(member, inside) of the buffer's first byte."""
        if self._members is None:
            return self.position, 0
        while len(self._starts) > 1 and self._starts[1][0] <= self.position:
            self._starts.pop(0)
        start, stored = self._starts[0]
        return stored, self.position - start

    def next_member(self) -> None:
        """Go on at the member behind a damaged one, of which nothing is left in the buffer."""
        self._damage = ""
        if self._members:
            self._members.skip_damage()

    def _next_block(self) -> bytes:
        if self._members is None:
            found, self._raw = self._raw or self._read(), b""
            return found
        found = self._members.take(INFLATED_BYTES)
        if not self._starts or self._starts[-1][1] != self._members.start:
            self._starts.append((self._end, self._members.start))
        return found

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
        place = source.place()
        record = _next_record(source, place, max_record_bytes) if source.buffer else ArchiveRecord(*place)
        if not _at_record(source) and source.damage:
            # A record alone in its member is as damaged as that; of several in one, those before the damage are whole.
            member, _ = source.place()
            if record.reason or not record.headers or place == (member, 0):
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


def _next_record(source: ArchiveBytes, place: tuple[int, int], max_record_bytes: int) -> ArchiveRecord:
    headers, size, problem = _read_header(source)
    if problem:
        skipped = _find_next(source)
        return ArchiveRecord(*place, headers, reason="broken_record", detail=f"{problem}; {skipped} bytes skipped")
    length = int(headers[b"content-length"])
    if length > max_record_bytes:
        source.drop(size)
        found, is_wrong = source.skip(length, NEXT_ARC if b"url" in headers else NEXT_WARC)
        if is_wrong:
            detail = f"content-length is {length}, the next record begins {found} bytes behind the header"
            return ArchiveRecord(*place, headers, reason="wrong_content_length", detail=detail)
        cut = "" if found == length else f", of which the file has {found}"
        detail = f"{length} bytes{cut}, ingest.max_record_bytes is {max_record_bytes}"
        return ArchiveRecord(*place, headers, reason="record_too_long", detail=detail)
    is_whole = source.fill(size + length + 1) or len(source.buffer) == size + length
    if is_whole and (len(source.buffer) == size + length or source.buffer[size + length] in b"\r\n"):
        block = bytes(memoryview(source.buffer)[size : size + length])
        source.drop(size + length)
        return ArchiveRecord(*place, headers, block)
    source.drop(size)
    found = len(source.buffer)
    skipped = _find_next(source)
    if not is_whole and skipped == found:
        return ArchiveRecord(*place, headers, reason="truncated_record", detail=f"{found} of {length} bytes are there")
    detail = f"content-length is {length}, the next record begins {skipped} bytes behind the header"
    return ArchiveRecord(*place, headers, reason="wrong_content_length", detail=detail)


def _read_header(source: ArchiveBytes) -> tuple[dict[bytes, bytes], int, str]:
    """(headers, bytes, problem) of the record at the buffer's start."""
    if not source.fill(len(WARC_START)) or not source.buffer.startswith(WARC_START):
        return _read_arc_line(source)
    end = width = 0
    for size in (MAX_ARC_LINE, MAX_HEADER_BYTES):
        source.fill(size)
        found = [(at, len(mark)) for mark in (b"\r\n\r\n", b"\n\n") if (at := source.buffer.find(mark, 0, size)) >= 0]
        if found:
            end, width = min(found)
            break
    if not end:
        return {}, 0, f"no end of the header in {MAX_HEADER_BYTES} bytes"
    headers = {name.lower(): value.rstrip() for name, value in reversed(HEADER_LINE.findall(source.buffer, 0, end))}
    if not headers.get(b"content-length", b"").isdigit():
        return headers, 0, f"content-length is {headers.get(b'content-length', b'missing').decode('latin-1')}"
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
    """Drop what stands before the next header, and give its size; without one everything is dropped."""
    skipped = 0
    while True:
        has_more = source.fill(MAX_HEADER_BYTES)
        found = _header_at(source.buffer)
        if found >= 0:
            source.drop(found)
            return skipped + found
        # A header may begin in the tail: it is looked at again with what follows.
        step = len(source.buffer) - MAX_ARC_LINE if has_more else len(source.buffer)
        source.drop(step)
        skipped += step
        if not has_more:
            return skipped


def _header_at(buffer: bytearray) -> int:
    """Where a header begins behind a line end; -1 for nowhere."""
    at = buffer.find(b"\n" + WARC_START)
    line = NEXT_ARC.search(buffer)
    found = [place + 1 for place in (at, -1 if line is None else line.start()) if place >= 0]
    return min(found, default=-1)
