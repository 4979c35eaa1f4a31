"""Reads source files into documents and rejected records, inside Spark executors. Parsing is per record; nothing is held but one batch.

Every file's sha256 is taken while it is read: a file that is not the listed one any more leaves a row of stream `changed`.
"""

from __future__ import annotations

import ast
import email
import gzip
import io
import zipfile
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from tasks.data.documents import DOCUMENT_COLUMNS, content_digest, cut_pieces, document_id, sampling_hash
from tasks.data.json_lines import HashingReader, json_lines

if TYPE_CHECKING:
    import pyarrow as pa

ROW_COLUMNS = f"stream string, {DOCUMENT_COLUMNS}, reason string, detail string"
DOCUMENT, EVALUATION, REJECTED, UNSAMPLED, CHANGED = "document", "evaluation", "rejected", "unsampled", "changed"
BATCH_CHARS = 8_000_000
BATCH_ROWS = 4000

Row = dict[str, Any]
Parsed = tuple[str, int, "str | None", str, str, "str | None"]
"""(source, offset, text, url, licence, language), where the text is None for a rejected record and url, licence hold reason, detail."""


def read_sources(batches: Iterator[pa.RecordBatch], max_document_chars: int, keep_below: dict[str, int]) -> Iterator[pa.RecordBatch]:
    """Rows of ROW_COLUMNS for source rows. `keep_below` holds per domain the sampling hash below which a document is kept."""
    rows: list[Row] = []
    num_chars = 0
    for batch in batches:
        for source in batch.to_pylist():
            for row in _source_rows(source, max_document_chars, keep_below[source["domain"]]):
                rows.append(row)
                num_chars += row["num_chars"]
                if num_chars > BATCH_CHARS or len(rows) >= BATCH_ROWS:
                    yield _batch(rows)
                    rows, num_chars = [], 0
    if rows:
        yield _batch(rows)


def _source_rows(source: Row, max_document_chars: int, keep_below: int) -> Iterator[Row]:
    stream = EVALUATION if source["role"] == "evaluation" else DOCUMENT
    num_unsampled = 0
    with open(source["path"], "rb") as raw:
        hashing = HashingReader(raw)
        for name, offset, text, url, licence, lang in _records(source, hashing):
            if text is None:
                yield _row(source, stream=REJECTED, source=name, offset=offset, reason=url, detail=licence)
            else:
                place = {"source": name, "offset": offset, "url": url, "licence": licence or source["licence"]}
                for row in _documents(source, stream, place, text, source["lang"] if lang is None else lang, max_document_chars):
                    if stream == DOCUMENT and sampling_hash(row["id"]) >= keep_below:
                        num_unsampled += 1
                    else:
                        yield row
        hashing.drain()
        if hashing.hexdigest() != source["sha256"]:
            yield _row(source, stream=CHANGED, source=source["name"], reason=CHANGED)
    if num_unsampled:
        yield _row(source, stream=UNSAMPLED, source=source["name"], offset=num_unsampled)


def _documents(source: Row, stream: str, place: Row, text: str, lang: str, max_document_chars: int) -> Iterator[Row]:
    pieces = cut_pieces(text, max_document_chars) if stream == DOCUMENT else [(0, text)]
    for start, piece in pieces:
        if not piece.strip():
            continue
        identity = document_id(place["source"], place["offset"], start)
        sizes = {"num_chars": len(piece), "num_bytes": len(piece.encode())}
        yield _row(
            source, stream=stream, **place, id=identity, piece=start, text=piece, lang=lang, content_digest=content_digest(piece), **sizes
        )


def _records(source: Row, file: HashingReader) -> Iterator[Parsed]:
    name, form = source["name"], source["format"]
    if form in ("jsonl", "repository_files", "commits"):
        yield from _json_records(source, file)
    elif form == "zip_text":
        yield from _zip_records(name, file)
    elif form in ("text", "pydoc_topics", "package_metadata"):
        data, problem = _read_all(file, name.endswith(".gz"))
        if problem:
            yield name, len(data), None, "truncated_gzip", problem, None
        elif form == "pydoc_topics":
            for key, topic in sorted(_topics(data).items()):
                yield f"{name}!{key}", 0, topic, "https://docs.python.org/3/reference/", "", None
        elif form == "package_metadata":
            yield _metadata_record(name, data)
        else:
            yield _text_record(name, 0, data)
    else:
        yield name, 0, None, "unsupported_format", form, None


def _text_record(name: str, offset: int, data: bytes) -> Parsed:
    if not data:
        return name, offset, None, "empty_file", "", None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return name, offset, None, "not_utf8", f"byte {error.start}: {error.reason}", None
    if not text.strip():
        return name, offset, None, "empty", "", None
    return name, offset, text, "", "", None


def _metadata_record(name: str, data: bytes) -> Parsed:
    parsed = _text_record(name, 0, data)
    if parsed[2] is None:
        return parsed
    message = email.message_from_string(parsed[2])
    description = str(message.get_payload() or message.get("Description") or "")
    if not description.strip():
        return name, 0, None, "empty_file", "", None
    return (
        name,
        0,
        description,
        f"https://pypi.org/project/{message['Name']}/{message['Version']}/",
        str(message.get("License-Expression") or ""),
        None,
    )


def _topics(data: bytes) -> dict[str, str]:
    assignment = next(node for node in ast.parse(data).body if isinstance(node, ast.Assign))
    return ast.literal_eval(assignment.value)


def _json_records(source: Row, file: HashingReader) -> Iterator[Parsed]:
    for line in json_lines(source["name"], file):
        if line.record is None:
            yield source["name"], line.offset, None, line.reason, line.detail, None
        else:
            yield _json_record(source, line.offset, line.record)


def _json_record(source: Row, offset: int, record: Row) -> Parsed:
    name = source["name"]
    text = "\n".join(_strings(record)) if source["role"] == "evaluation" else _text_of(record, tuple(source["text"]))
    if text is None:
        return name, offset, None, "no_text", f"fields are {', '.join(sorted(record))}"[:200], None
    if not text.strip():
        return name, offset, None, "empty", "", None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return name, offset, None, "not_utf8", f"character {error.start}: {error.reason}", None
    lang = record.get("lang")
    return name, offset, text, _url(record), _first_string(record, ("licence", "license")), lang if isinstance(lang, str) else None


def _text_of(record: Row, fields: tuple[str, ...]) -> str | None:
    if not fields:
        found = [record[name] for name in ("text", "content") if isinstance(record.get(name), str)][:1]
    else:
        found = [record[name] for name in fields if isinstance(record.get(name), str)]
    parts = [part for part in found if part.strip()]
    return "\n\n".join(parts) if found else None


def _strings(value: Any) -> list[str]:
    """Every string in a JSON value, in the order of its fields."""
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for child in children for text in _strings(child)]


def _url(record: Row) -> str:
    if all(isinstance(record.get(key), str) for key in ("repo", "commit")):
        path = record.get("path")
        return f"https://github.com/{record['repo']}/" + (
            f"blob/{record['commit']}/{path}" if isinstance(path, str) else f"commit/{record['commit']}"
        )
    return _first_string(record, ("url", "uri"))


def _first_string(record: Row, names: tuple[str, ...]) -> str:
    return next((record[name] for name in names if isinstance(record.get(name), str)), "")


def _zip_records(name: str, file: HashingReader) -> Iterator[Parsed]:
    try:
        archive = zipfile.ZipFile(io.BytesIO(file.read()))
        for member in sorted(archive.namelist()):
            if not member.endswith("/"):
                yield _text_record(f"{name}!{member}", 0, archive.read(member))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        yield name, 0, None, "broken_zip", str(error), None


def _read_all(file: HashingReader, is_gzip: bool) -> tuple[bytes, str]:
    """(bytes, problem): of a broken gzip what stands before the break."""
    if not is_gzip:
        return file.read(), ""
    found = bytearray()
    try:
        with gzip.GzipFile(fileobj=cast("BinaryIO", file)) as stream:
            while block := stream.read(1 << 20):
                found += block
    except (EOFError, OSError, zlib.error) as error:
        return bytes(found), str(error)
    return bytes(found), ""


def _row(origin: Row, /, **values: Any) -> Row:
    empty = {"id": "", "offset": 0, "piece": 0, "url": "", "licence": "", "lang": "", "text": "", "content_digest": ""}
    given = {"collection": origin["collection"], "domain": origin["domain"], "num_chars": 0, "num_bytes": 0, "reason": "", "detail": ""}
    return {**empty, **given, **values}


def _batch(rows: list[Row]) -> pa.RecordBatch:
    import pyarrow as pa

    types = {"string": pa.string(), "long": pa.int64()}
    fields = [column.split(" ") for column in ROW_COLUMNS.split(", ")]
    return pa.RecordBatch.from_pylist(rows, schema=pa.schema([(name, types[kind]) for name, kind in fields]))
