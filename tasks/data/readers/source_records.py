"""Reads source files into documents and rejected records, inside Spark executors, one batch at a time.

Parsing is per record. Every file's sha256 is taken while it is read. A file that is no longer the listed one leaves a
row of stream `changed`. A file that a disk, a network or a permission keeps from being read leaves a row of stream
`unreadable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.data.readers.git_trees import GIT_COMMITS, commit_records, commits_digest, head_of
from tasks.data.readers.issue_threads import ISSUES, thread_records
from tasks.data.readers.parsed_records import Parsed, rejection
from tasks.data.readers.seen_keys import SeenKeys
from tasks.data.readers.source_bytes import (
    ChangedSourceError,
    HashingReader,
    UnreadableSourceError,
    is_listed,
    open_source,
)
from tasks.data.readers.table_records import CSV, HTML_LINES, JSON, csv_records, json_records, parquet_records
from tasks.data.readers.text_records import html_file, package_record, text_records, topic_records, zip_records
from tasks.data.readers.web_archives import archive_pages
from tasks.data.readers.wiki_dumps import wiki_pages
from tasks.data.records.documents import PLAIN, RECORD_COLUMNS, arrow_schema, content_digest, document_id, sampling_hash

if TYPE_CHECKING:
    import pyarrow as pa

ROW_COLUMNS = f"stream string, {RECORD_COLUMNS}, reason string, detail string"
DOCUMENT, EVALUATION, REJECTED, UNSAMPLED, CHANGED = "document", "evaluation", "rejected", "unsampled", "changed"
UNREADABLE, LOST = "unreadable", "lost"
"""LOST: its `offset` is the number of stored bytes after a damage that ends the reading of a file."""
BATCH_CHARS = 8_000_000
BATCH_ROWS = 4000
RECORD_FORMATS = ("jsonl", JSON, "repository_files", "commits", HTML_LINES)

Source = dict[str, Any]
"""A row of tasks/data/sources/source_frame.py. A dictionary, as Arrow gives it: there is one per file, not per
record."""


class SourceRow(NamedTuple):
    """One row of ROW_COLUMNS, in their order."""

    stream: str
    id: str = ""
    source: str = ""
    offset: int = 0
    piece: int = 0
    collection: str = ""
    url: str = ""
    licence: str = ""
    domain: str = ""
    lang: str = ""
    repository: str = ""
    path: str = ""
    text: str = ""
    content_digest: str = ""
    num_chars: int = 0
    num_bytes: int = 0
    markup: str = PLAIN
    reason: str = ""
    detail: str = ""


def read_sources(
    batches: Iterator[pa.RecordBatch], keep_below: dict[str, int], max_record_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Rows of ROW_COLUMNS for source rows. `keep_below` holds per domain the sampling hash below which a document is
    kept."""
    rows: list[SourceRow] = []
    num_chars = 0
    for batch in batches:
        for source in batch.to_pylist():
            for row in _source_rows(source, keep_below[source["domain"]], max_record_bytes):
                rows.append(row)
                num_chars += row.num_chars
                if num_chars > BATCH_CHARS or len(rows) >= BATCH_ROWS:
                    yield _batch(rows)
                    rows, num_chars = [], 0
    if rows:
        yield _batch(rows)


def _source_rows(source: Source, keep_below: int, max_record_bytes: int) -> Iterator[SourceRow]:
    stream = EVALUATION if source["role"] == "evaluation" else DOCUMENT
    empty = SourceRow(REJECTED, source=source["name"], collection=source["collection"], domain=source["domain"])
    num_unsampled = 0
    seen = SeenKeys()
    try:
        for parsed in _listed_records(source, max_record_bytes):
            if parsed.text is None:
                kind = LOST if parsed.reason == LOST else REJECTED
                rejected = empty._replace(stream=kind, source=parsed.source, offset=parsed.offset)
                yield rejected._replace(reason=parsed.reason, detail=parsed.detail)
            elif stream == DOCUMENT and parsed.key and not seen.add(parsed.key):
                rejected = empty._replace(source=parsed.source, offset=parsed.offset)
                yield rejected._replace(reason="duplicate_id", detail=f"an earlier record has id {parsed.key}"[:500])
            elif stream == DOCUMENT and sampling_hash(document_id(parsed.source, parsed.offset, 0)) >= keep_below:
                num_unsampled += 1
            else:
                yield _record(source, stream, parsed, parsed.text)
    except ChangedSourceError:
        yield empty._replace(stream=CHANGED, reason=CHANGED)
    except UnreadableSourceError as error:
        yield empty._replace(stream=UNREADABLE, reason=UNREADABLE, detail=str(error)[:500])
    if num_unsampled:
        yield empty._replace(stream=UNSAMPLED, offset=num_unsampled)


def _record(source: Source, stream: str, parsed: Parsed, text: str) -> SourceRow:
    return SourceRow(
        stream,
        id=document_id(parsed.source, parsed.offset, 0),
        source=parsed.source,
        offset=parsed.offset,
        collection=source["collection"],
        url=parsed.url,
        licence=parsed.licence or source["licence"],
        domain=source["domain"],
        lang=source["lang"] if parsed.lang is None else parsed.lang,
        repository=parsed.repository,
        path=parsed.path,
        text=text,
        content_digest=content_digest(text),
        num_chars=len(text),
        num_bytes=len(text.encode()),
        markup=parsed.markup,
    )


def _listed_records(source: Source, max_record_bytes: int) -> Iterator[Parsed]:
    """The records of a source. Raises ChangedSourceError after the last one where it is not the listed one."""
    if source["format"] == GIT_COMMITS:
        given = (source["repository"], source["licence"], source["max_commits"], max_record_bytes)
        yield from commit_records(source["name"], source["path"], *given)
        is_same = commits_digest(head_of(source["path"]), source["max_commits"]) == source["sha256"]
    else:
        with open_source(source["path"], source["sha256"]) as raw:
            hashing = HashingReader(raw)
            records = _records(source, hashing, max_record_bytes)
            yield next(records, rejection(source["name"], 0, "empty_file", "it holds no record"))
            yield from records
            is_same = is_listed(hashing, source["sha256"])
            num_lost = 0 if hashing.broken_at is None else raw.seek(0, 2) - hashing.broken_at
            if num_lost:
                yield rejection(source["name"], num_lost, LOST)
    if not is_same:
        raise ChangedSourceError(source["name"])


def _records(source: Source, file: HashingReader, max_record_bytes: int) -> Iterator[Parsed]:
    name, form = source["name"], source["format"]
    if form in RECORD_FORMATS:
        yield from json_records(source, file, max_record_bytes)
    elif form == CSV:
        yield from csv_records(source, file, max_record_bytes)
    elif form == ISSUES:
        yield from thread_records(source, file, max_record_bytes)
    elif form == "parquet":
        yield from parquet_records(source, max_record_bytes)
    elif form == "web_archive":
        yield from archive_pages(name, file, max_record_bytes)
    elif form == "mediawiki":
        yield from wiki_pages(name, file, source["lang"], max_record_bytes)
    elif form == "zip_text":
        yield from zip_records(name, source["path"], source["sha256"], max_record_bytes)
    elif form == "html":
        yield html_file(name, file, max_record_bytes)
    elif form == "pydoc_topics":
        yield from topic_records(name, file, max_record_bytes)
    elif form == "package_metadata":
        yield package_record(name, file, max_record_bytes)
    elif form == "text":
        location = {"repository": source["repository"], "path": source["repository_path"]}
        yield from (replace(record, **location) for record in text_records(name, file, max_record_bytes))
    else:
        yield rejection(name, 0, "unsupported_format", form)


def _batch(rows: list[SourceRow]) -> pa.RecordBatch:
    import pyarrow as pa

    schema = arrow_schema(ROW_COLUMNS)
    columns = zip(*rows, strict=True)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
