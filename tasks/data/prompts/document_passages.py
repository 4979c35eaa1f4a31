"""Takes a passage from each document: its first paragraph that is long enough, on one line.

Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tasks.data.records.documents import TRAIN, arrow_schema, sampling_hash

if TYPE_CHECKING:
    import pyarrow as pa

PASSAGE_COLUMNS = "id string, passage string"
MIN_PASSAGE_CHARS, MAX_PASSAGE_CHARS = 80, 300


def passage_of(text: str) -> str:
    """At most MAX_PASSAGE_CHARS, without a part of a word; empty where no paragraph has MIN_PASSAGE_CHARS."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    passage = next((each for each in paragraphs if len(each) >= MIN_PASSAGE_CHARS), "")
    if len(passage) <= MAX_PASSAGE_CHARS:
        return passage
    words = passage[: MAX_PASSAGE_CHARS + 1].rpartition(" ")[0]
    return words if len(words) >= MIN_PASSAGE_CHARS else passage[:MAX_PASSAGE_CHARS]


def take_passages(batches: Iterator[pa.RecordBatch], count: int) -> Iterator[pa.RecordBatch]:
    """PASSAGE_COLUMNS of the training documents (id, text, split) that have a passage, the `count` of smallest sampling
    hash."""
    return _smallest(_passages(batches), count)


def keep_passages(batches: Iterator[pa.RecordBatch], count: int) -> Iterator[pa.RecordBatch]:
    """The `count` rows (PASSAGE_COLUMNS) of smallest sampling hash."""
    return _smallest((batch.to_pylist() for batch in batches), count)


def _passages(batches: Iterator[pa.RecordBatch]) -> Iterator[list[dict[str, str]]]:
    for batch in batches:
        taken = ((row["id"], passage_of(row["text"])) for row in batch.to_pylist() if row["split"] == TRAIN)
        yield [{"id": identity, "passage": passage} for identity, passage in taken if passage]


def _smallest(read: Iterator[list[dict[str, str]]], count: int) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    kept: list[dict[str, str]] = []
    for rows in read:
        kept = sorted([*kept, *rows], key=lambda row: (sampling_hash(row["id"]), row["id"]))[:count]
    yield pa.RecordBatch.from_pylist(kept, schema=arrow_schema(PASSAGE_COLUMNS))
