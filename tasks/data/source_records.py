"""Reads source files into documents and rejected records, inside Spark executors. Parsing is per record; nothing is held but one batch.

Every file's sha256 is taken while it is read: a file that is not the listed one any more leaves a row of stream `changed`.
"""

from __future__ import annotations

import ast
import email
import gzip
import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from tasks.data.documents import CODE, COMMIT, JSON_RECORD, PLAIN, RECORD_COLUMNS, arrow_schema, content_digest, document_id, sampling_hash
from tasks.data.json_lines import HashingReader, json_lines

if TYPE_CHECKING:
    import pyarrow as pa

ROW_COLUMNS = f"stream string, {RECORD_COLUMNS}, reason string, detail string"
DOCUMENT, EVALUATION, REJECTED, UNSAMPLED, CHANGED = "document", "evaluation", "rejected", "unsampled", "changed"
BATCH_CHARS = 8_000_000
BATCH_ROWS = 4000

Row = dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """A record of a source. Without a text it is rejected, and url and licence hold reason and detail."""

    source: str
    offset: int
    text: str | None
    url: str = ""
    licence: str = ""
    lang: str | None = None
    repository: str = ""
    path: str = ""
    markup: str = PLAIN


def read_sources(batches: Iterator[pa.RecordBatch], keep_below: dict[str, int]) -> Iterator[pa.RecordBatch]:
    """Rows of ROW_COLUMNS for source rows. `keep_below` holds per domain the sampling hash below which a document is kept."""
    rows: list[Row] = []
    num_chars = 0
    for batch in batches:
        for source in batch.to_pylist():
            for row in _source_rows(source, keep_below[source["domain"]]):
                rows.append(row)
                num_chars += row["num_chars"]
                if num_chars > BATCH_CHARS or len(rows) >= BATCH_ROWS:
                    yield _batch(rows)
                    rows, num_chars = [], 0
    if rows:
        yield _batch(rows)


def _source_rows(source: Row, keep_below: int) -> Iterator[Row]:
    stream = EVALUATION if source["role"] == "evaluation" else DOCUMENT
    num_unsampled = 0
    with open(source["path"], "rb") as raw:
        hashing = HashingReader(raw)
        for parsed in _records(source, hashing):
            if parsed.text is None:
                yield _row(
                    source, stream=REJECTED, source=parsed.source, offset=parsed.offset, reason=parsed.url, detail=parsed.licence
                )  # fmt: skip
                continue
            if stream == DOCUMENT and sampling_hash(document_id(parsed.source, parsed.offset, 0)) >= keep_below:
                num_unsampled += 1
            else:
                yield _record(source, stream, parsed, parsed.text)
        hashing.drain()
        if hashing.hexdigest() != source["sha256"]:
            yield _row(source, stream=CHANGED, source=source["name"], reason=CHANGED)
    if num_unsampled:
        yield _row(source, stream=UNSAMPLED, source=source["name"], offset=num_unsampled)


def _record(source: Row, stream: str, parsed: Parsed, text: str) -> Row:
    place = {
        "source": parsed.source, "offset": parsed.offset, "url": parsed.url, "licence": parsed.licence or source["licence"],
        "lang": source["lang"] if parsed.lang is None else parsed.lang, "repository": parsed.repository, "path": parsed.path,
        "markup": parsed.markup,
    }  # fmt: skip
    identity = document_id(parsed.source, parsed.offset, 0)
    sizes = {"num_chars": len(text), "num_bytes": len(text.encode())}
    return _row(source, stream=stream, **place, id=identity, text=text, content_digest=content_digest(text), **sizes)


def _records(source: Row, file: HashingReader) -> Iterator[Parsed]:
    name, form = source["name"], source["format"]
    if form in ("jsonl", "repository_files", "commits"):
        yield from _json_records(source, file)
    elif form == "zip_text":
        yield from _zip_records(name, file)
    elif form in ("text", "pydoc_topics", "package_metadata"):
        data, problem = _read_all(file, name.endswith(".gz"))
        if problem:
            yield Parsed(name, len(data), None, "truncated_gzip", problem)
        elif form == "pydoc_topics":
            for key, topic in sorted(_topics(data).items()):
                yield Parsed(f"{name}!{key}", 0, topic, "https://docs.python.org/3/reference/")
        elif form == "package_metadata":
            yield _metadata_record(name, data)
        else:
            yield replace(_text_record(name, 0, data), repository=source["repository"], path=source["repository_path"])
    else:
        yield Parsed(name, 0, None, "unsupported_format", form)


def _text_record(name: str, offset: int, data: bytes) -> Parsed:
    if not data:
        return Parsed(name, offset, None, "empty_file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Parsed(name, offset, None, "not_utf8", f"byte {error.start}: {error.reason}")
    if not text.strip():
        return Parsed(name, offset, None, "empty")
    return Parsed(name, offset, text)


def _metadata_record(name: str, data: bytes) -> Parsed:
    parsed = _text_record(name, 0, data)
    if parsed.text is None:
        return parsed
    message = email.message_from_string(parsed.text)
    description = str(message.get_payload() or message.get("Description") or "")
    if not description.strip():
        return Parsed(name, 0, None, "empty_file")
    url = f"https://pypi.org/project/{message['Name']}/{message['Version']}/"
    return Parsed(name, 0, description, url, str(message.get("License-Expression") or ""))


def _topics(data: bytes) -> dict[str, str]:
    assignment = next(node for node in ast.parse(data).body if isinstance(node, ast.Assign))
    return ast.literal_eval(assignment.value)


def _json_records(source: Row, file: HashingReader) -> Iterator[Parsed]:
    for line in json_lines(source["name"], file):
        if line.record is None:
            yield Parsed(source["name"], line.offset, None, line.reason, line.detail)
        else:
            yield _json_record(source, line.offset, line.record)


def _json_record(source: Row, offset: int, record: Row) -> Parsed:
    name = source["name"]
    text = "\n".join(_strings(record)) if source["role"] == "evaluation" else _text_of(record, tuple(source["text"]))
    if text is None:
        return Parsed(name, offset, None, "no_text", f"fields are {', '.join(sorted(record))}"[:200])
    if not text.strip():
        return Parsed(name, offset, None, "empty")
    markup = PLAIN
    if source["role"] == "evaluation":
        text, markup = json.dumps(record, ensure_ascii=False), JSON_RECORD
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Parsed(name, offset, None, "not_utf8", f"character {error.start}: {error.reason}")
    lang = record.get("lang")
    repository = _first_string(record, ("repo", "repository")) if source["domain"] in (CODE, COMMIT) else ""
    return Parsed(
        name, offset, text, _url(record), _first_string(record, ("licence", "license")), lang if isinstance(lang, str) else None,
        repository, _first_string(record, ("path",)) if repository else "", markup,
    )  # fmt: skip


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
        yield Parsed(name, 0, None, "broken_zip", str(error))


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
    empty |= {"repository": "", "path": "", "markup": PLAIN}
    given = {"collection": origin["collection"], "domain": origin["domain"], "num_chars": 0, "num_bytes": 0, "reason": "", "detail": ""}
    return {**empty, **given, **values}


def _batch(rows: list[Row]) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_pylist(rows, schema=arrow_schema(ROW_COLUMNS))
