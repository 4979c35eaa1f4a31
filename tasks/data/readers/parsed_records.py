"""The rows that readers of source files return: a record with its position, or a position with a reason.

The reason says why there is no record. Runs in executors: imports no Spark.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.data.records.documents import PLAIN


@dataclass(frozen=True)
class Parsed:
    """A record of a source; without a text it is rejected for `reason`."""

    source: str
    offset: int
    text: str | None
    url: str = ""
    licence: str = ""
    lang: str | None = None
    repository: str = ""
    path: str = ""
    markup: str = PLAIN
    key: str = ""
    """The record's own id in its source; empty where it has none."""
    reason: str = ""
    detail: str = ""


def rejection(source: str, offset: int, reason: str, detail: str = "") -> Parsed:
    """A record that was not read."""
    return Parsed(source, offset, None, reason=reason, detail=detail[:500])


def too_long(source: str, offset: int, num_bytes: int, max_record_bytes: int) -> Parsed:
    """The rejection of a record above the bound, which was not kept in memory."""
    return rejection(
        source, offset, "record_too_long", f"{num_bytes} bytes, ingest.max_record_bytes is {max_record_bytes}"
    )
