"""Turns records of any markup into rows of plain text. A page is bounded before it is parsed.

Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tasks.data.extraction.html_text import BROKEN, NO_CONTENT, TOO_LARGE, html_to_text
from tasks.data.extraction.wikitext import is_redirect, wikitext_to_text
from tasks.data.records.documents import (
    DOCUMENT_COLUMNS,
    HTML,
    WIKITEXT,
    arrow_schema,
    content_digest,
    cut_pieces,
    document_id,
)

if TYPE_CHECKING:
    import pyarrow as pa

EXTRACTED_COLUMNS = f"{DOCUMENT_COLUMNS}, markup string, reason string"
FAILURES = (NO_CONTENT, BROKEN, TOO_LARGE)
"""Reasons that are the extractor's fault or the page's, and count against max_failed_share."""
TOO_SHORT, REDIRECT, EMPTY = "too_short", "redirect", "empty"
BATCH_CHARS = 8_000_000


def extract_batches(
    batches: Iterator[pa.RecordBatch],
    html_extractor: str,
    max_markup_chars: int,
    min_chars: int,
    max_document_chars: int,
) -> Iterator[pa.RecordBatch]:
    """EXTRACTED_COLUMNS for rows of RECORD_COLUMNS: one row per piece, or one without text and with a reason."""
    import pyarrow as pa

    schema = arrow_schema(EXTRACTED_COLUMNS)
    for batch in batches:
        rows: list[dict[str, Any]] = []
        num_chars = 0
        for index in range(batch.num_rows):
            (record,) = batch.slice(index, 1).to_pylist()
            text, reason = record_text(record["text"], record["markup"], html_extractor, max_markup_chars, min_chars)
            for row in _rows(record, text, reason, max_document_chars):
                rows.append(row)
                num_chars += row["num_chars"]
            if num_chars > BATCH_CHARS:
                yield pa.RecordBatch.from_pylist(rows, schema=schema)
                rows, num_chars = [], 0
        yield pa.RecordBatch.from_pylist(rows, schema=schema)


def record_text(text: str, markup: str, html_extractor: str, max_markup_chars: int, min_chars: int) -> tuple[str, str]:
    """(plain text, "") or ("", reason) of one record. Lines of plain text end as Unix ends them: two line ends part
    paragraphs."""
    if markup not in (HTML, WIKITEXT):
        return (text.replace("\r\n", "\n").replace("\r", "\n"), "") if text.strip() else ("", EMPTY)
    if len(text) > max_markup_chars:
        return "", TOO_LARGE
    if markup == HTML:
        plain, reason = html_to_text(text, html_extractor)
    elif is_redirect(text):
        return "", REDIRECT
    else:
        plain = wikitext_to_text(text)
        reason = "" if plain.strip() else NO_CONTENT
    if not reason and len(plain) < min_chars:
        return "", TOO_SHORT
    return plain, reason


def _rows(record: dict[str, Any], text: str, reason: str, max_document_chars: int) -> Iterator[dict[str, Any]]:
    if reason:
        yield {**record, "text": "", "num_chars": 0, "num_bytes": 0, "reason": reason}
        return
    for start, piece in cut_pieces(text, max_document_chars):
        if piece.strip():
            sizes = {"content_digest": content_digest(piece), "num_chars": len(piece), "num_bytes": len(piece.encode())}
            identity = document_id(record["source"], record["offset"], start)
            yield {**record, "id": identity, "piece": start, "text": piece, **sizes, "reason": ""}
