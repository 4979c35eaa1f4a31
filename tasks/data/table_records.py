"""Reads records with fields: JSON lines and Parquet. Runs in executors: imports no Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tasks.data.documents import CODE, COMMIT, HTML, JSON_RECORD, PLAIN
from tasks.data.json_lines import json_lines
from tasks.data.parsed_records import Parsed, rejection, too_long
from tasks.data.source_bytes import HashingReader, open_source

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_FIELDS = ("text", "content")
HTML_FIELDS = ("html", *TEXT_FIELDS)
PLACE_FIELDS = ("id", "url", "uri", "licence", "license", "lang", "repo", "repository", "path", "commit")
BATCH_ROWS = 64
"""Of a Parquet file in memory at once: web pages of a megabyte are no exception."""
HTML_LINES = "html_jsonl"

Row = dict[str, Any]


def json_records(source: Row, file: HashingReader, max_record_bytes: int) -> Iterator[Parsed]:
    """The records of a file of JSON lines; `offset` is the line's first byte, decompressed."""
    for line in json_lines(source["name"], file, max_record_bytes):
        if line.record is None:
            yield rejection(source["name"], line.offset, line.reason, line.detail)
        else:
            yield record_of(source, line.offset, line.record)


def parquet_records(source: Row, max_record_bytes: int) -> Iterator[Parsed]:
    """The rows of a Parquet file, read group by group; `offset` is the row's number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    name, number = source["name"], 0
    with open_source(source["path"], source["sha256"]) as file:
        try:
            table = pq.ParquetFile(file)
            columns, missing = _columns(source, table.schema_arrow.names)
            if missing:
                yield rejection(name, 0, "missing_column", missing)
                return
            if not table.metadata.num_rows:
                yield rejection(name, 0, "empty_file")
            for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                for row in _rows(batch):
                    yield _bounded(source, number, row, max_record_bytes)
                    number += 1
        except (pa.ArrowException, OSError) as error:
            yield rejection(name, number, "broken_parquet", str(error))


def _columns(source: Row, names: list[str]) -> tuple[list[str], str]:
    """(columns to read, what is missing)."""
    if source["role"] == "evaluation":
        return names, ""
    wanted = list(source["text"]) or [field for field in _default_fields(source) if field in names][:1]
    absent = [field for field in wanted if field not in names] if source["text"] else []
    if absent or not wanted:
        sought = f"column {absent[0]!r} (the entry's `text`)" if absent else f"none of the columns {', '.join(_default_fields(source))}"
        return [], f"{sought} is in {source['name']}, which has {', '.join(names)}: name its text in the entry's `text`"
    return [field for field in names if field in wanted or field in PLACE_FIELDS], ""


def _rows(batch: pa.RecordBatch) -> list[Row]:
    """Rows as dictionaries; a string that is not UTF-8 becomes bytes, which no text is."""
    import pyarrow as pa

    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        kinds = [field.with_type(pa.binary()) if pa.types.is_string(field.type) else field for field in batch.schema]
        rows = pa.RecordBatch.from_arrays(
            [column.cast(field.type) for column, field in zip(batch.columns, kinds, strict=True)], batch.schema.names
        )
        return [{name: _text_or_bytes(value) for name, value in row.items()} for row in rows.to_pylist()]


def _text_or_bytes(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _bounded(source: Row, number: int, row: Row, max_record_bytes: int) -> Parsed:
    size = sum(len(value) for value in row.values() if isinstance(value, str | bytes))
    if size > max_record_bytes:
        return too_long(source["name"], number, size, max_record_bytes)
    broken = next((name for name, value in row.items() if isinstance(value, bytes) and name in (*source["text"], *HTML_FIELDS)), None)
    if broken is not None:
        return rejection(source["name"], number, "not_utf8", f"column {broken}")
    return record_of(source, number, row)


def record_of(source: Row, offset: int, record: Row) -> Parsed:
    """A record by the fields that its source's entry names."""
    name = source["name"]
    text = json.dumps(record, ensure_ascii=False, default=str) if source["role"] == "evaluation" else _text_of(source, record)
    if text is None:
        return rejection(name, offset, "no_text", f"fields are {', '.join(sorted(record))}")
    if not text.strip():
        return rejection(name, offset, "empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return rejection(name, offset, "not_utf8", f"character {error.start}: {error.reason}")
    lang, key = record.get("lang"), record.get("id")
    repository = _first_string(record, ("repo", "repository")) if source["domain"] in (CODE, COMMIT) else ""
    markup = JSON_RECORD if source["role"] == "evaluation" else HTML if source["format"] == HTML_LINES else PLAIN
    return Parsed(
        name, offset, text, _url(record), _first_string(record, ("licence", "license")), lang if isinstance(lang, str) else None,
        repository, _first_string(record, ("path",)) if repository else "", markup, str(key) if isinstance(key, str | int) else "",
    )  # fmt: skip


def _default_fields(source: Row) -> tuple[str, ...]:
    return HTML_FIELDS if source["format"] == HTML_LINES else TEXT_FIELDS


def _text_of(source: Row, record: Row) -> str | None:
    fields = source["text"]
    if not fields:
        found = [record[name] for name in _default_fields(source) if isinstance(record.get(name), str)][:1]
    else:
        found = [record[name] for name in fields if isinstance(record.get(name), str)]
    parts = [part for part in found if part.strip()]
    return "\n\n".join(parts) if found else None


def _url(record: Row) -> str:
    if all(isinstance(record.get(key), str) for key in ("repo", "commit")):
        path = record.get("path")
        return f"https://github.com/{record['repo']}/" + (
            f"blob/{record['commit']}/{path}" if isinstance(path, str) else f"commit/{record['commit']}"
        )
    return _first_string(record, ("url", "uri"))


def _first_string(record: Row, names: tuple[str, ...]) -> str:
    return next((record[name] for name in names if isinstance(record.get(name), str)), "")
