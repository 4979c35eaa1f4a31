"""Reads the objects of JSON arrays, or of JSON values one after the other, with their byte offsets.

`gh` prints one array, `gh api --paginate` an array per page, `jq` objects over many lines. Brackets of arrays are
opened whatever their depth, so all of them are the same objects. One object at a time is held. Runs in executors:
imports no Spark.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator

from tasks.data.readers.json_lines import JsonLine, parse_object
from tasks.data.readers.source_bytes import BLOCK_BYTES, GARBLED, HashingReader, codec_of, decompressed

STRUCTURE = re.compile(rb'(?:[^"{}]++|"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+")*+(["{}])?', re.DOTALL)
"""Matches up to the next brace, or up to a string that does not end in this block."""
STRING_REST = re.compile(rb'[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+', re.DOTALL)
BETWEEN = b" \t\r\n,[]" + codecs.BOM_UTF8
QUOTE, OPENING, BACKSLASH = b'"', b"{", b"\\"


class _NoObjectError(Exception):
    """(byte, what is wrong there)."""


def json_objects(name: str, file: HashingReader, max_object_bytes: int) -> Iterator[JsonLine]:
    """Every object. What is no JSON ends the file with broken_json, since the start of the next object is unknown."""
    scanner = _Scanner(max_object_bytes)
    try:
        for offset, data, size in scanner.objects(decompressed(name, file)):
            if size > max_object_bytes:
                detail = f"{size} bytes, at most {max_object_bytes} are read (ingest.max_record_bytes)"
                yield JsonLine(offset, None, "record_too_long", detail)
            else:
                yield parse_object(offset, data)
    except _NoObjectError as error:
        offset, what = error.args
        yield JsonLine(offset, None, "broken_json", f"{what}: nothing after it is read from this file")
    except GARBLED as error:
        yield JsonLine(
            scanner.start if scanner.depth else scanner.offset, None, f"truncated_{codec_of(name)}", str(error)
        )


class _Scanner:
    """State of the reading: `offset` of the block, `start` of the open object, and `depth`, its number of open
    braces."""

    def __init__(self, max_object_bytes: int) -> None:
        self.offset = self.start = self.depth = 0
        self._max_bytes = max_object_bytes
        self._held, self._size = bytearray(), 0
        self._is_in_string = self._is_escaped = False

    def objects(self, stream: io.BufferedIOBase) -> Iterator[tuple[int, bytes, int]]:
        """(first byte, the object, its size); at most the bound and one block of a larger object are kept in memory."""
        while block := stream.read(BLOCK_BYTES):
            yield from self._block_objects(block)
            self.offset += len(block)
        if self.depth:
            raise _NoObjectError(self.start, "the file ends inside this object")

    def _block_objects(self, block: bytes) -> Iterator[tuple[int, bytes, int]]:
        begun = index = 0
        while True:
            if self._is_in_string:
                index = self._end_string(block, index)
                if self._is_in_string:
                    break
            if not self.depth:
                index = self._find_object(block, index)
            match = STRUCTURE.match(block, index)
            if match is None or match[1] is None:
                break
            token, index = match[1], match.end()
            if token == QUOTE:
                self._is_in_string = True
            elif token == OPENING:
                if not self.depth:
                    begun, self.start = index - 1, self.offset + index - 1
                self.depth += 1
            else:
                self.depth -= 1
                if not self.depth:
                    self._hold(block[begun:index])
                    yield self.start, bytes(self._held), self._size
                    self._held, self._size = bytearray(), 0
        if self.depth:
            self._hold(block[begun:])

    def _end_string(self, block: bytes, index: int) -> int:
        """The index after the end of an open string, which began in an earlier block; the block's end where the string
        does not end in it."""
        rest = STRING_REST.match(block, index + self._is_escaped)
        assert rest is not None
        end, self._is_escaped = rest.end(), False
        if end >= len(block):
            return len(block)
        following = block[end : end + 1]
        if following == BACKSLASH:
            self._is_escaped = True
            return len(block)
        if following != QUOTE:
            raise _NoObjectError(
                self.start, f"a string of this object has no end, or a control character at byte {self.offset + end}"
            )
        self._is_in_string = False
        return end + 1

    def _find_object(self, block: bytes, index: int) -> int:
        """The index of the next opening brace, or the block's end."""
        start = block.find(OPENING, index)
        start = len(block) if start < 0 else start
        other = block[index:start].lstrip(BETWEEN)
        if other:
            raise _NoObjectError(self.offset + start - len(other), "neither a JSON object nor an array of them")
        return start

    def _hold(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= self._max_bytes:
            self._held += part
        else:
            self._held.clear()
