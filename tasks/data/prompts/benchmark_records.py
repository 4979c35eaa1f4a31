"""Reads the records of a benchmark's file: JSON lines, Parquet, or a plain text whose articles are records."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tasks.data.readers.json_lines import JsonLine
from tasks.data.readers.record_lines import record_lines as lines_of
from tasks.data.readers.source_bytes import HashingReader, decompressed, open_source

if TYPE_CHECKING:
    from tasks.data.sources.list_sources import SourceFile

Record = Mapping[str, Any]
ARTICLE = re.compile(r"^ = [^=\n]+ = $", re.MULTILINE)
"""First line of an article in WikiText: each is an item. What comes before the first is one, and so is another plain
text."""


def read_records(file: SourceFile, kind: str) -> list[Record]:
    """Raises ValueError for a line that is no JSON object, and for a row that cannot be read."""
    if file.format == "text" and kind == "text":
        return _articles(file)
    lines = list(record_lines(file))
    for number, line in enumerate(lines, 1):
        if line.record is None:
            raise ValueError(f"{file.name}, record {number}: {line.reason} ({line.detail}): correct the file")
    return [line.record for line in lines if line.record is not None]


def _articles(file: SourceFile) -> list[Record]:
    with open_source(file.path, file.sha256) as raw:
        data = decompressed(file.name, HashingReader(raw)).read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name}: {error}: write the file as UTF-8") from error
    starts = [match.start() for match in ARTICLE.finditer(text)]
    articles = [text[start:end].strip() for start, end in pairwise([0, *starts, len(text)])]
    return [{"text": article} for article in articles if article] or [{"text": ""}]


def record_lines(file: SourceFile) -> Iterator[JsonLine]:
    """The records of a file in their order, one at a time; a broken one has a reason."""
    with open_source(file.path, file.sha256) as raw:
        yield from lines_of(file.format, file.name, file.path, file.sha256, HashingReader(raw))
