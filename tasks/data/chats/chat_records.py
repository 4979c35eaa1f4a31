"""Reads source files of conversations, inside Spark executors: rows of kept, dropped and rejected ones.

Overlap with evaluation items is looked up in the text of all turns, not in function descriptions. Personal data is
masked after that, since evaluation items keep theirs. Digests are taken after masking: duplicates have the same text
after masking.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.data.chats.chat_formats import conversations_of
from tasks.data.chats.chat_tools import MalformedChatError
from tasks.data.privacy.masked_chats import NUMBER_KINDS, mask_chats
from tasks.data.privacy.personal_data import COUNT_COLUMNS, KINDS
from tasks.data.readers.json_lines import JsonLine
from tasks.data.readers.record_lines import record_lines
from tasks.data.readers.source_bytes import ChangedSourceError, HashingReader, is_listed, open_source
from tasks.data.records.documents import CHAT_COLUMNS, arrow_schema, content_digest, document_id

if TYPE_CHECKING:
    import pyarrow as pa

    from model.text.chat_template import Message

ROW_COLUMNS = (
    f"stream string, {CHAT_COLUMNS}, {COUNT_COLUMNS}, digest string, reason string, kept_id string, detail string"
)
KEPT, DROPPED, REJECTED, CHANGED = "kept", "dropped", "rejected", "changed"
BATCH_ROWS = 1000
TOO_LONG = "too_long"

Row = dict[str, Any]


@dataclass(frozen=True)
class Judging:
    """The limits and indices by which conversations are judged."""

    max_chat_chars: int
    masked_kinds: tuple[str, ...]
    """Kinds of personal data that are masked."""
    items: Any
    """A Spark broadcast of (OverlapIndex, ProtectedItems)."""


def read_chats(batches: Iterator[pa.RecordBatch], judging: Judging) -> Iterator[pa.RecordBatch]:
    """Rows of ROW_COLUMNS for source rows."""
    rows = (row for batch in batches for source in batch.to_pylist() for row in source_rows(source, _line_rows, _empty))
    yield from _judged(rows, judging)


def judge_chats(batches: Iterator[pa.RecordBatch], judging: Judging) -> Iterator[pa.RecordBatch]:
    """Rows of ROW_COLUMNS for rows that are conversations already (CHAT_COLUMNS without num_bytes): problems, whose
    numbers are not masked."""
    rows = (
        _row(row, json.loads(row["messages"]), json.loads(row["tools"]), True)
        for batch in batches
        for row in batch.to_pylist()
    )
    yield from _judged(rows, judging)


def source_rows(
    source: Row, line_rows: Callable[[Row, JsonLine], Iterator[Row]], empty: Callable[..., Row]
) -> Iterator[Row]:
    """The rows of a source file's lines; the last one, of stream CHANGED, says that the file is not the listed one."""
    try:
        with open_source(source["path"], source["sha256"]) as raw:
            hashing = HashingReader(raw)
            address = (source["format"], source["name"], source["path"], source["sha256"])
            for line in record_lines(*address, hashing):
                yield from line_rows(source, line)
            is_same = is_listed(hashing, source["sha256"])
    except ChangedSourceError:
        is_same = False
    if not is_same:
        yield empty(source, 0, stream=CHANGED)


def _line_rows(source: Row, line: JsonLine) -> Iterator[Row]:
    if line.record is None:
        yield _empty(source, line.offset, stream=REJECTED, reason=line.reason, detail=line.detail)
        return
    try:
        yield from [
            _chat_row(source, line.offset, piece, *chat) for piece, chat in enumerate(conversations_of(line.record))
        ]
    except MalformedChatError as error:
        yield _empty(source, line.offset, stream=REJECTED, reason=error.reason, detail=error.detail)
    except UnicodeEncodeError as error:
        yield _empty(
            source, line.offset, stream=REJECTED, reason="not_utf8", detail=f"character {error.start}: {error.reason}"
        )


def _chat_row(source: Row, offset: int, piece: int, messages: Sequence[Message], tools: Sequence[Row]) -> Row:
    """The row of one conversation. Raises MalformedChatError for a value of a Parquet file that JSON cannot hold."""
    identity = {
        "id": document_id(source["name"], offset, piece),
        "source": source["name"],
        "offset": offset,
        "piece": piece,
    }
    identity |= {key: source[key] for key in ("collection", "licence", "kind")}
    try:
        return _row(identity, messages, tools, source["kind"] in NUMBER_KINDS)
    except TypeError as error:
        raise MalformedChatError("broken_turn", str(error)) from error


def _row(identity: Row, messages: Sequence[Message], tools: Sequence[Row], keeps_numbers: bool) -> Row:
    """A row with stream KEPT. Raises UnicodeEncodeError for characters that UTF-8 cannot encode."""
    row = {**identity, "messages": to_json(messages), "tools": to_json(tools), "keeps_numbers": keeps_numbers}
    return {**row, **_sizes(row), "stream": KEPT, "reason": "", "kept_id": "", "detail": ""}


def _sizes(row: Row) -> Row:
    written = f"{row['messages']}\n{row['tools']}"
    return {"num_bytes": len(written.encode()), "digest": content_digest(written), **dict.fromkeys(KINDS, 0)}


def _judged(rows: Iterator[Row], judging: Judging) -> Iterator[pa.RecordBatch]:
    waiting: list[Row] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) == BATCH_ROWS:
            yield _batch(waiting, judging)
            waiting = []
    if waiting:
        yield _batch(waiting, judging)


def _batch(rows: list[Row], judging: Judging) -> pa.RecordBatch:
    import pyarrow as pa

    index, protected = judging.items.value
    kept = [row for row in rows if row["stream"] == KEPT]
    chats = [json.loads(row["messages"]) for row in kept]
    texts = ["\n".join(strings_of(messages)) for messages in chats]
    for row, text, hit in zip(kept, texts, index.first_hits(texts).tolist(), strict=True):
        if len(text) > judging.max_chat_chars:
            row.update(stream=DROPPED, reason=TOO_LONG)
        elif hit >= 0:
            row.update(stream=DROPPED, reason=protected.reason(hit), kept_id=protected.ids[hit])
    masked = mask_chats(chats, [row["keeps_numbers"] for row in kept], judging.masked_kinds)
    for row, (messages, counts) in zip(kept, masked, strict=True):
        if counts:
            row["messages"] = to_json(messages)
            row.update(_sizes(row) | counts)
    return pa.RecordBatch.from_pylist(rows, schema=arrow_schema(ROW_COLUMNS))


def strings_of(messages: list[Row]) -> Iterator[str]:
    """Reasoning and contents of messages, and the names and arguments of calls, in order."""
    for message in messages:
        yield from filter(None, (message["reasoning"], message["content"]))
        for call in message["tool_calls"]:
            yield call["name"]
            yield from (value if isinstance(value, str) else to_json(value) for value in call["arguments"].values())


def _empty(source: Row, offset: int, **values: str) -> Row:
    identity = {
        "id": document_id(source["name"], offset, 0),
        "source": source["name"],
        "offset": offset,
        "piece": 0,
        "num_bytes": 0,
    }
    texts = {
        "messages": "",
        "tools": "",
        "digest": "",
        "reason": "",
        "kept_id": "",
        "detail": "",
        **dict.fromkeys(KINDS, 0),
    }
    return {**identity, **{key: source[key] for key in ("collection", "licence", "kind")}, **texts, **values}


def to_json(value: Any) -> str:
    """A value as JSON, fields in the given order: the order of a call's arguments is part of the text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
