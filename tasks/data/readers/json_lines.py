"""Reads JSON lines with their byte offsets while the whole file is hashed. Runs in executors: imports no Spark."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tasks.data.readers.source_bytes import BLOCK_BYTES, GARBLED, HashingReader, codec_of, decompressed

MAX_LINE_BYTES = 256 * 2**20
MAX_DEPTH = 100
"""Largest depth of nested lists and objects. Python's own bound depends on the depth of the caller: one stage could
read what the next could not."""


@dataclass(frozen=True)
class JsonLine:
    """One record, or why there is none."""

    offset: int
    """First byte of the line in the decompressed file."""
    record: dict[str, Any] | None
    reason: str
    detail: str


def json_lines(name: str, file: HashingReader, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[JsonLine]:
    """The lines of a file that are not blank; a broken compression ends with reason truncated_gzip, _bz2, _xz or
    _zstd."""
    stream = decompressed(name, file)
    offset = 0
    try:
        while line := stream.readline(max_line_bytes + 1):
            size = len(line)
            if size > max_line_bytes and not line.endswith(b"\n"):
                size += _skip_line(stream)
                detail = f"{size} bytes, at most {max_line_bytes} are read (ingest.max_record_bytes)"
                yield JsonLine(offset, None, "record_too_long", detail)
            elif line.strip():
                yield parse_object(offset, line)
            offset += size
    except GARBLED as error:
        yield JsonLine(offset, None, f"truncated_{codec_of(name)}", str(error))


def _skip_line(stream: io.BufferedIOBase) -> int:
    """Skip the rest of a line, one block at a time; returns its bytes."""
    skipped = 0
    while rest := stream.readline(BLOCK_BYTES):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def parse_object(offset: int, line: bytes) -> JsonLine:
    """The object that these bytes encode, or the reason why they encode none."""
    try:
        record = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
        if b"\\ud" in line or b"\\uD" in line:
            # JSON can name half of a surrogate pair, which no column and no file can hold.
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        return JsonLine(offset, None, "not_utf8", f"byte {error.start}: {error.reason}")
    except UnicodeEncodeError:
        return JsonLine(offset, None, "not_utf8", "half of a surrogate pair")
    except (ValueError, RecursionError) as error:
        return JsonLine(offset, None, "broken_json", str(error))
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and is_deep(record):
        return JsonLine(offset, None, "broken_json", f"nested more than {MAX_DEPTH} levels deep")
    if not isinstance(record, dict):
        return JsonLine(offset, None, "broken_json", f"a record must be an object, is {type(record).__name__}")
    return JsonLine(offset, record, "", "")


def is_deep(value: object, levels: int = MAX_DEPTH) -> bool:
    """Whether lists and objects nest deeper than `levels`."""
    if not isinstance(value, dict | list):
        return False
    return not levels or any(
        is_deep(part, levels - 1) for part in (value.values() if isinstance(value, dict) else value)
    )
