"""Reads records with fields: JSON lines, JSON arrays, CSV and Parquet. Runs in executors: imports no Spark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from tasks.data.readers.csv_lines import csv_lines
from tasks.data.readers.json_lines import JsonLine, json_lines
from tasks.data.readers.json_objects import json_objects
from tasks.data.readers.parsed_records import Parsed, rejection
from tasks.data.readers.source_bytes import BLOCK_BYTES, HashingReader, open_source
from tasks.data.records.documents import CODE, COMMIT, HTML, JSON_RECORD, PLAIN

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_FIELDS = ("text", "content")
HTML_FIELDS = ("html", *TEXT_FIELDS)
URLS = ("url", "uri", "source_url", "u")
"""The last as HPLT names it."""
DESCRIPTIONS = ("metadata", "meta")
"""Mappings in which Dolma and RedPajama keep the address."""
LICENCES = ("licence", "license", "max_stars_repo_licenses", "detected_licenses")
REPOSITORIES = ("repo", "repository", "repo_name", "max_stars_repo_name")
REPOSITORY_PATHS = ("path", "max_stars_repo_path")
"""The last ones as The Stack names them."""
ORIGIN_FIELDS = ("id", "lang", "commit", *URLS, *DESCRIPTIONS, *LICENCES, *REPOSITORIES, *REPOSITORY_PATHS)
BATCH_ROWS = 64
"""Rows of a Parquet file in memory at once: few, since a web page can have a megabyte."""
HTML_LINES = "html_jsonl"
JSON = "json"
"""A JSON array of records, or records one after the other."""
CSV = "csv"

Row = dict[str, Any]
"""A record of a user's file, which may hold any fields, or the row of its source."""


def json_records(source: Row, file: HashingReader, max_record_bytes: int) -> Iterator[Parsed]:
    """The records of a file of JSON lines or of a JSON array; `offset` is the first byte of each, decompressed."""
    read = json_objects if source["format"] == JSON else json_lines
    yield from _records_of(source, read(source["name"], file, max_record_bytes))


def csv_records(source: Row, file: HashingReader, max_record_bytes: int) -> Iterator[Parsed]:
    """The rows of a CSV file; `offset` is the first byte of each, decompressed."""
    lines = csv_lines(source["name"], file, max_record_bytes, lambda names: _columns(source, names)[1])
    yield from _records_of(source, lines)


def parquet_records(source: Row, max_record_bytes: int) -> Iterator[Parsed]:
    """The rows of a Parquet file; `offset` is the row's number."""
    address = (source["name"], source["path"], source["sha256"])
    yield from _records_of(source, parquet_lines(*address, max_record_bytes, partial(_columns, source)))


def _records_of(source: Row, lines: Iterator[JsonLine]) -> Iterator[Parsed]:
    for line in lines:
        if line.record is None:
            yield rejection(source["name"], line.offset, line.reason, line.detail)
        else:
            yield record_of(source, line.offset, line.record)


def parquet_lines(
    name: str, address: str, digest: str, max_record_bytes: int, choose: Callable[[list[str]], tuple[list[str], str]]
) -> Iterator[JsonLine]:
    """The rows of a file, read group by group. `choose` gives the columns to read and, where one is missing, a
    message."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    with open_source(address, digest) as file:
        try:
            table = pq.ParquetFile(file, pre_buffer=False, buffer_size=BLOCK_BYTES)
            columns, missing = choose(table.schema_arrow.names)
            if missing:
                yield JsonLine(0, None, "missing_column", missing)
                return
            if repeated := next((column for column in columns if table.schema_arrow.names.count(column) > 1), None):
                yield JsonLine(0, None, "broken_parquet", f"{name}: two columns are named {repeated}")
                return
            if not table.metadata.num_rows:
                yield JsonLine(0, None, "empty_file", "")
        except (pa.ArrowException, OSError) as error:
            yield JsonLine(0, None, "broken_parquet", f"{name}: {error}"[:500])
            return
        for group in range(table.num_row_groups):
            end = number + table.metadata.row_group(group).num_rows
            try:
                for batch in table.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=columns):
                    for row in _rows(batch):
                        yield _bounded(number, row, max_record_bytes)
                        number += 1
            except (pa.ArrowException, OSError) as error:
                for lost in range(number, end):
                    yield JsonLine(lost, None, "broken_parquet", f"{name}, row group {group}: {error}"[:500])
            number = end


def _columns(source: Row, names: list[str]) -> tuple[list[str], str]:
    """(columns to read, what is missing)."""
    if source["role"] == "evaluation":
        return names, ""
    wanted = list(source["text"]) or [field for field in _default_fields(source) if field in names]
    absent = [field for field in wanted if field not in names] if source["text"] else []
    if absent or not wanted:
        sought = (
            f"column {absent[0]!r} (the entry's `text`)"
            if absent
            else f"none of the columns {', '.join(_default_fields(source))}"
        )
        return [], f"{sought} is in {source['name']}, which has {', '.join(names)}: name its text in the entry's `text`"
    return [field for field in names if field in wanted or field in ORIGIN_FIELDS], ""


def _rows(batch: pa.RecordBatch) -> Iterator[Row | tuple[str, str]]:
    """Each row, or (reason, detail) where Python cannot hold one of its values: bytes that are not UTF-8, a date after
    year 9999."""
    try:
        rows: list[Any] = batch.to_pylist()
    except (ValueError, OverflowError):
        rows = [_row(batch, number) for number in range(batch.num_rows)]
    for row in rows:
        yield {name: _without_nulls(value) for name, value in row.items()} if isinstance(row, dict) else row


def _without_nulls(value: Any) -> Any:
    """A value whose objects lack the fields that are null: in Parquet all objects of a column have the fields of each,
    so a call of one function would have the arguments of every other."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _row(batch: pa.RecordBatch, number: int) -> Row | tuple[str, str]:
    row: Row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[number].as_py()
        except UnicodeDecodeError:
            return "not_utf8", f"column {name}"
        except (ValueError, OverflowError) as error:
            return "broken_parquet", f"column {name}: {error}"[:500]
    return row


def _bounded(number: int, row: Row | tuple[str, str], max_record_bytes: int) -> JsonLine:
    if isinstance(row, tuple):
        return JsonLine(number, None, *row)
    size = sum(len(value) for value in row.values() if isinstance(value, str | bytes))
    if size > max_record_bytes:
        return JsonLine(number, None, "record_too_long", f"{size} bytes, ingest.max_record_bytes is {max_record_bytes}")
    return JsonLine(number, row, "", "")


def record_of(source: Row, offset: int, record: Row) -> Parsed:
    """A record by the fields that its source's entry names."""
    name = source["name"]
    text = (
        json.dumps(record, ensure_ascii=False, default=str)
        if source["role"] == "evaluation"
        else _text_of(source, record)
    )
    if text is None:
        return rejection(name, offset, "no_text", _why_no_text(source, record))
    if not text.strip():
        return rejection(name, offset, "empty")
    is_code, key = source["domain"] in (CODE, COMMIT), record.get("id")
    lang = None if is_code else record.get("lang")  # of code it is that of the program
    repository = _first_string(record, REPOSITORIES) if is_code else ""
    markup = JSON_RECORD if source["role"] == "evaluation" else HTML if source["format"] == HTML_LINES else PLAIN
    return Parsed(
        name,
        offset,
        text,
        _url(record),
        _first_string(record, LICENCES),
        lang if isinstance(lang, str) else None,
        repository,
        _first_string(record, REPOSITORY_PATHS) if repository else "",
        markup,
        str(key) if isinstance(key, str | int) else "",
    )


def _why_no_text(source: Row, record: Row) -> str:
    wanted = source["text"] or _default_fields(source)
    others = [
        f"{name} is {type(record[name]).__name__}, not a string: write it as one"
        for name in wanted
        if record.get(name) is not None
    ]
    absent = "null" if any(name in record for name in wanted) else "not there"
    return "; ".join(others) or f"{' and '.join(wanted)} {absent}; fields are {', '.join(sorted(record))}"


def _default_fields(source: Row) -> tuple[str, ...]:
    return HTML_FIELDS if source["format"] == HTML_LINES else TEXT_FIELDS


def _text_of(source: Row, record: Row) -> str | None:
    fields = source["text"]
    if not fields:
        strings = [record[name] for name in _default_fields(source) if isinstance(record.get(name), str)][:1]
    else:
        strings = [record[name] for name in fields if isinstance(record.get(name), str)]
    parts = [part for part in strings if part.strip()]
    return "\n\n".join(parts) if strings else None


def _url(record: Row) -> str:
    if all(isinstance(record.get(key), str) for key in ("repo", "commit")):
        path = record.get("path")
        return f"https://github.com/{record['repo']}/" + (
            f"blob/{record['commit']}/{path}" if isinstance(path, str) else f"commit/{record['commit']}"
        )
    described = (record[name] for name in DESCRIPTIONS if isinstance(record.get(name), dict))
    return next((url for fields in (record, *described) if (url := _first_string(fields, URLS))), "")


def _first_string(record: Row, names: tuple[str, ...]) -> str:
    """The first of the fields that holds a text, or texts in a list, which become one."""
    for value in map(record.get, names):
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
            return ", ".join(value)
    return ""
