"""Reads JSON lines with their byte offsets while the whole file is hashed. Runs in executors: imports no Spark."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

MAX_LINE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class JsonLine:
    """One record, or why there is none."""

    offset: int
    """First byte of the line in the decompressed file."""
    record: dict[str, Any] | None
    reason: str
    detail: str


def json_lines(name: str, file: HashingReader) -> Iterator[JsonLine]:
    """The lines of a file that hold anything; a broken gzip ends with reason truncated_gzip."""
    stream = gzip.GzipFile(fileobj=cast("BinaryIO", file)) if name.endswith(".gz") else file
    offset = 0
    while True:
        try:
            line = stream.readline(MAX_LINE_BYTES)
        except (EOFError, OSError, zlib.error) as error:
            yield JsonLine(offset, None, "truncated_gzip", str(error))
            return
        if not line:
            return
        if line.strip():
            yield _parse(offset, line)
        offset += len(line)


def _parse(offset: int, line: bytes) -> JsonLine:
    try:
        record = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return JsonLine(offset, None, "not_utf8", f"byte {error.start}: {error.reason}")
    except ValueError as error:
        return JsonLine(offset, None, "broken_json", str(error))
    if not isinstance(record, dict):
        return JsonLine(offset, None, "broken_json", f"a record must be an object, is {type(record).__name__}")
    return JsonLine(offset, record, "", "")


class HashingReader(io.BufferedIOBase):
    """A forward-only file that hashes what is read from it."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._digest = hashlib.sha256()

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._raw.read(-1 if size is None else size)
        self._digest.update(data)
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        data = self._raw.readline(-1 if size is None else size)
        self._digest.update(data)
        return data

    def drain(self) -> None:
        """Read what is left, so that the digest is the whole file's."""
        while self.read(1 << 20):
            pass

    def hexdigest(self) -> str:
        """sha256 of what was read."""
        return self._digest.hexdigest()
