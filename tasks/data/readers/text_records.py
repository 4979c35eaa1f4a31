"""Reads text files, and zip archives of text files. Runs in executors: imports no Spark."""

from __future__ import annotations

import ast
import codecs
import email
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator

from tasks.data.readers.http_payloads import PayloadError, decode_text
from tasks.data.readers.parsed_records import Parsed, rejection, too_long
from tasks.data.readers.source_bytes import (
    BLOCK_BYTES,
    GARBLED,
    HashingReader,
    blocks,
    codec_of,
    decompressed,
    open_source,
)
from tasks.data.records.documents import HTML

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
CODING = re.compile(rb"(?:[ \t\f]*(?:#[^\r\n]*)?\r?\n)?[ \t\f]*#[^\r\n]*?coding[:=][ \t]*([-\w.]+)")
"""In one of the first two lines."""
BROKEN_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    RuntimeError,
    NotImplementedError,
    UnicodeDecodeError,
)
"""Exceptions of a damaged archive or member; UnicodeDecodeError: a name that is not UTF-8."""


class _Utf8Stream(io.BufferedIOBase):
    """UTF-16 with its mark as UTF-8, block by block; other bytes as they are. Only read1 is there."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream, self._ready, self._has_ended = stream, b"", False
        while len(self._ready) < 2 and (more := stream.read1(2 - len(self._ready))):
            self._ready += more
        self.is_utf16 = self._ready.startswith(UTF16_MARKS)
        self._decoder = codecs.getincrementaldecoder("utf-16")() if self.is_utf16 else None
        if self._decoder is not None:
            self._ready = self._decoder.decode(self._ready).encode()

    def read1(self, size: int = BLOCK_BYTES, /) -> bytes:
        while not self._ready and not self._has_ended:
            block = self._stream.read1(size)
            self._has_ended = not block
            self._ready = block if self._decoder is None else self._decoder.decode(block, final=not block).encode()
        taken, self._ready = self._ready[:size], self._ready[size:]
        return taken


def text_records(name: str, file: HashingReader, max_record_bytes: int) -> Iterator[Parsed]:
    """A file as one record; where it is longer than a record may be, cut after the last line end that fits. Sizes and
    offsets are those of UTF-8, into which UTF-16 is changed first: cut between its bytes it would be no text."""
    offset, rest = 0, b""
    try:
        stream = _Utf8Stream(decompressed(name, file))
        while True:
            data, damage = _read_up_to(stream, max_record_bytes + 1 - len(rest))
            data = rest + data
            if len(data) <= max_record_bytes:
                yield from _last_text(name, offset, data, damage)
                return
            end = data.rfind(b"\n", 0, max_record_bytes) + 1
            if end:
                yield text_record(name, offset, data[:end])
                offset, rest = offset + end, data[end:]
            else:
                size, rest = _skip_line(stream, data)
                yield too_long(name, offset, size, max_record_bytes)
                offset += size
    except UnicodeDecodeError as error:
        yield rejection(name, offset, "not_utf8", error.reason)
    except GARBLED as error:
        yield rejection(name, offset, f"truncated_{codec_of(name)}", str(error))


def whole_file(name: str, file: HashingReader, max_record_bytes: int) -> tuple[bytes, Parsed | None]:
    """The bytes of a file that is one record, or the rejection of one that is too long or damaged."""
    try:
        stream = decompressed(name, file)
        data, damage = _read_up_to(stream, max_record_bytes + 1)
        if damage:
            return b"", rejection(name, 0, f"truncated_{codec_of(name)}", damage)
        if len(data) <= max_record_bytes:
            return data, None
        size = len(data)
        size += sum(map(len, blocks(stream)))
        return b"", too_long(name, 0, size, max_record_bytes)
    except GARBLED as error:
        return b"", rejection(name, 0, f"truncated_{codec_of(name)}", str(error))


def html_file(name: str, file: HashingReader, max_record_bytes: int) -> Parsed:
    """A page saved as a file, in whatever character set it declares or that can be detected."""
    data, problem = whole_file(name, file, max_record_bytes)
    if problem is not None:
        return problem
    if not data:
        return rejection(name, 0, "empty_file")
    try:
        text = decode_text(data, "")
    except PayloadError as error:
        return rejection(name, 0, error.reason, error.detail)
    return Parsed(name, 0, text, markup=HTML) if text.strip() else rejection(name, 0, "empty")


def text_record(name: str, offset: int, data: bytes) -> Parsed:
    """Bytes that must be UTF-8, UTF-16 with its mark, or source code that declares how it is encoded."""
    if not data:
        return rejection(name, offset, "empty_file")
    try:
        text = data.decode("utf-16" if data.startswith(UTF16_MARKS) else "utf-8-sig")
    except UnicodeDecodeError as error:
        text = _as_declared(data)
        if text is None:
            return rejection(name, offset, "not_utf8", f"byte {error.start}: {error.reason}")
    if "\0" in text:
        return rejection(name, offset, "binary", f"a NUL character at {text.index(chr(0))}")
    return Parsed(name, offset, text) if text.strip() else rejection(name, offset, "empty")


def _as_declared(data: bytes) -> str | None:
    """Source code with a coding line (PEP 263) as that says; None of anything else, such as of an encoding in which the
    line itself would be another text."""
    declared = CODING.match(data)
    if declared is None:
        return None
    try:
        text = data.decode(declared[1].decode())
        text.encode()
    except (LookupError, UnicodeError):
        return None
    return text if text.startswith(declared[0].decode(errors="replace")) else None


def topic_records(name: str, file: HashingReader, max_record_bytes: int) -> Iterator[Parsed]:
    """The values of the dictionary in pydoc's module of topics."""
    data, problem = whole_file(name, file, max_record_bytes)
    if problem is not None:
        yield problem
        return
    assignment = next(node for node in ast.parse(data).body if isinstance(node, ast.Assign))
    for key, topic in sorted(ast.literal_eval(assignment.value).items()):
        yield Parsed(f"{name}!{key}", 0, topic, "https://docs.python.org/3/reference/")


def package_record(name: str, file: HashingReader, max_record_bytes: int) -> Parsed:
    """The description in a distribution's METADATA."""
    data, problem = whole_file(name, file, max_record_bytes)
    parsed = problem or text_record(name, 0, data)
    if parsed.text is None:
        return parsed
    message = email.message_from_string(parsed.text)
    description = str(message.get_payload() or message.get("Description") or "")
    if not description.strip():
        return rejection(name, 0, "empty_file")
    url = f"https://pypi.org/project/{message['Name']}/{message['Version']}/"
    return Parsed(name, 0, description, url, str(message.get("License-Expression") or ""))


def zip_records(name: str, address: str, digest: str, max_record_bytes: int) -> Iterator[Parsed]:
    """The members of an archive in the order of their names; a damaged one costs only itself."""
    with open_source(address, digest) as file:
        try:
            archive = zipfile.ZipFile(file)
        except BROKEN_ZIP as error:
            yield rejection(name, 0, "broken_zip", str(error))
            return
        before = ""
        for member in sorted(archive.infolist(), key=lambda info: info.filename):
            source = f"{name}!{member.filename}"
            if source == before:
                yield rejection(source, 0, "duplicate_id", "an earlier member has this name")
            elif not member.filename:
                yield rejection(source, 0, "broken_zip", "a member has no name")
            elif not member.is_dir():
                yield _member_record(archive, member, source, max_record_bytes)
            before = source


def _member_record(archive: zipfile.ZipFile, member: zipfile.ZipInfo, source: str, max_record_bytes: int) -> Parsed:
    try:
        with archive.open(member) as file:
            assert isinstance(file, io.BufferedIOBase), file
            stream = _Utf8Stream(file)
            if member.file_size > max_record_bytes and not stream.is_utf16:
                return too_long(source, 0, member.file_size, max_record_bytes)
            data, damage = _read_up_to(stream, max_record_bytes + 1)
            if damage:
                return rejection(source, 0, "broken_zip", damage)
            if len(data) > max_record_bytes:
                return too_long(source, 0, member.file_size, max_record_bytes)
            return text_record(source, 0, data)
    except UnicodeDecodeError as error:
        return rejection(source, 0, "not_utf8", error.reason)
    except BROKEN_ZIP as error:
        return rejection(source, 0, "broken_zip", str(error))


def _last_text(name: str, offset: int, data: bytes, damage: str) -> Iterator[Parsed]:
    """The rest of a file; of a damaged file only whole lines."""
    end = data.rfind(b"\n") + 1 if damage else len(data)
    if end or not (offset or damage):
        yield text_record(name, offset, data[:end])
    if damage:
        yield rejection(name, offset + end, f"truncated_{codec_of(name)}", damage)


def _read_up_to(stream: io.BufferedIOBase, size: int) -> tuple[bytes, str]:
    """(`size` bytes, fewer before the end or a damage; the damage)."""
    parts, left = [], size
    try:
        while left > 0 and (block := stream.read1(min(left, BLOCK_BYTES))):
            parts.append(block)
            left -= len(block)
    except GARBLED as error:
        return b"".join(parts), str(error)
    return b"".join(parts), ""


def _skip_line(stream: io.BufferedIOBase, data: bytes) -> tuple[int, bytes]:
    """(size of the line that begins with `data`, bytes read after its end)."""
    size = 0
    while data:
        end = data.find(b"\n") + 1
        if end:
            return size + end, data[end:]
        size += len(data)
        data = stream.read1(BLOCK_BYTES)
    return size, b""
