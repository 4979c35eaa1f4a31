"""Reads the pages of web archives (WARC, ARC) and their plain texts (WET). Runs in executors: imports no Spark.

Responses, resources and conversions are documents or have a reason. Requests, crawl metadata, look-ups of names and
visits that repeat an earlier page hold no document and are skipped. A WAT file holds metadata about pages and no
text: each of its records says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from tasks.data.readers.archive_records import ArchiveRecord, archive_records
from tasks.data.readers.http_payloads import HttpResponse, PayloadError, decode_body, decode_text, parse_response
from tasks.data.readers.parsed_records import Parsed, rejection
from tasks.data.readers.source_bytes import HashingReader
from tasks.data.records.documents import HTML, PLAIN

DOCUMENT_TYPES = (b"response", b"resource", b"conversion")
MARKUP_TYPES = ("text/html", "application/xhtml+xml")
PLAIN_TYPES = ("text/plain", "text/markdown", "text/x-rst")
OK = 200
NOT_PAGES = ("filedesc:", "dns:", "whois:", "metadata:")
"""Beginnings of addresses that are no pages: an ARC file's description of itself, look-ups, a crawler's log."""
NAME_LOOKUP, HTTP, JSON = "text/dns", "application/http", "application/json"


def archive_pages(name: str, file: HashingReader, max_record_bytes: int) -> Iterator[Parsed]:
    """The documents of an archive; `offset` is the record's (or its gzip member's) byte in the file as stored."""
    for record in archive_records(name, file, max_record_bytes):
        source = f"{name}!{record.member}" if record.inside else name
        offset = record.inside or record.member
        headers = record.headers
        kind = headers.get(b"warc-type", b"response")
        content_type = _media_type(headers.get(b"content-type", b"").decode("latin-1"))
        if record.reason:
            if not headers or kind in DOCUMENT_TYPES:
                yield rejection(source, offset, record.reason, f"{_url(headers)} {record.detail}".strip())
        elif kind == b"metadata" and content_type == JSON:
            yield rejection(
                source, offset, "no_text", "a WAT record holds metadata about a page: read the WARC or the WET file"
            )
        elif kind in DOCUMENT_TYPES and content_type != NAME_LOOKUP and not _url(headers).startswith(NOT_PAGES):
            yield _page(source, offset, record, content_type, max_record_bytes)


def _page(source: str, offset: int, record: ArchiveRecord, content_type: str, max_record_bytes: int) -> Parsed:
    url, headers = _url(record.headers), record.headers
    try:
        if b"warc-segment-number" in headers:
            raise PayloadError("segmented_record", "parts of one page in several records are not put together")
        if b"warc-type" not in headers or content_type == HTTP:
            response = parse_response(record.block)
            if response.status != OK:
                raise PayloadError("http_status", str(response.status))
        else:
            response = HttpResponse(
                OK, {"content-type": headers.get(b"content-type", b"").decode("latin-1")}, record.block
            )
        markup = _markup(response)
        body = decode_body(response, max_record_bytes, is_cut=b"warc-truncated" in headers)
        text = decode_text(body, response.headers.get("content-type", ""))
    except PayloadError as error:
        return rejection(source, offset, error.reason, f"{url} {error.detail}")
    if not text or text.isspace():
        return rejection(source, offset, "empty", url)
    return Parsed(source, offset, text, url, markup=markup)


def _markup(response: HttpResponse) -> str:
    content_type = _media_type(response.headers.get("content-type", ""))
    if content_type in MARKUP_TYPES:
        return HTML
    if content_type in PLAIN_TYPES:
        return PLAIN
    if not content_type and b"<html" in response.body[:1024].lower():
        return HTML
    raise PayloadError("not_text", content_type or "no content type")


def _media_type(value: str) -> str:
    return value.partition(";")[0].strip().lower()


def _url(headers: dict[bytes, bytes]) -> str:
    """The page's address, without the angle brackets that some writers add."""
    return headers.get(b"warc-target-uri", headers.get(b"url", b"")).decode("utf-8", errors="replace").strip("<>")
