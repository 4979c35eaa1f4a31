"""Reads the records of a file with all their fields: JSON lines, a JSON array, CSV, Parquet. Runs in executors: imports
no Spark."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.data.readers.csv_lines import csv_lines
from tasks.data.readers.json_lines import MAX_LINE_BYTES, JsonLine, json_lines
from tasks.data.readers.json_objects import json_objects
from tasks.data.readers.source_bytes import HashingReader
from tasks.data.readers.table_records import CSV, JSON, parquet_lines

TABLES = ("jsonl", JSON, CSV, "parquet")
"""Formats of files that hold records with fields."""


def record_lines(form: str, name: str, address: str, digest: str, file: HashingReader) -> Iterator[JsonLine]:
    """The records of a file of format `form` in their order, one at a time. `offset` is a byte, and the row's number in
    Parquet. A broken record has a reason, and so has a file of another format."""
    if form == "jsonl":
        yield from json_lines(name, file)
    elif form == JSON:
        yield from json_objects(name, file, MAX_LINE_BYTES)
    elif form == CSV:
        yield from csv_lines(name, file, MAX_LINE_BYTES)
    elif form == "parquet":
        yield from parquet_lines(name, address, digest, MAX_LINE_BYTES, lambda names: (names, ""))
    else:
        yield JsonLine(0, None, "unsupported_format", f"{form or 'no format'}: {', '.join(TABLES)} have records")
