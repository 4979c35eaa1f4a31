"""Looks evaluation items up in what is trained on, by the kind of table that holds it. Runs in executors: imports no
Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tasks.data.chats.chat_records import strings_of
from tasks.data.decontamination.overlap import find_overlaps
from tasks.data.records.documents import TRAIN

if TYPE_CHECKING:
    import pyarrow as pa

DOCUMENTS, CHATS, PAIRS, PROMPTS = "document", "conversation", "preference pair", "prompt"
"""Kinds of training text; a document may be a whole repository."""
COLUMNS_OF = {
    DOCUMENTS: ("id", "split", "text"),
    CHATS: ("id", "split", "messages"),
    PAIRS: ("id", "split", "prompt", "chosen", "rejected"),
    PROMPTS: ("id", "prompt"),
}
"""Columns that are read of each. Prompts have no split: all are trained on."""
PLAIN_TEXT = {DOCUMENTS: "text", PROMPTS: "prompt"}
"""Columns that are text as they are; the others hold JSON."""


def find_in_trained(batches: Iterator[pa.RecordBatch], kind: str, index: Any) -> Iterator[pa.RecordBatch]:
    """HIT_COLUMNS and the kind for the rows that are trained on; `index` is a Spark broadcast of an OverlapIndex."""
    import pyarrow as pa

    for hits in find_overlaps(_texts(batches, kind), index):
        yield hits.append_column("kind", pa.array([kind] * len(hits), pa.string()))


def _texts(batches: Iterator[pa.RecordBatch], kind: str) -> Iterator[pa.RecordBatch]:
    """(id, text) of the rows that are trained on."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for batch in batches:
        kept = batch if kind == PROMPTS else batch.filter(pc.equal(batch.column("split"), TRAIN))  # pyright: ignore[reportAttributeAccessIssue]
        if kind in PLAIN_TEXT:
            texts = kept.column(PLAIN_TEXT[kind])
        else:
            texts = pa.array([_text_of(row, kind) for row in kept.to_pylist()], pa.string())
        yield pa.RecordBatch.from_arrays([kept.column("id"), texts], names=["id", "text"])


def _text_of(row: dict[str, Any], kind: str) -> str:
    """The text of a conversation or a pair as decontamination looks it up."""
    if kind == CHATS:
        return "\n".join(strings_of(json.loads(row["messages"])))
    answers = (json.loads(row["chosen"]), json.loads(row["rejected"]))
    return "\n".join(strings_of([*json.loads(row["prompt"]), *answers]))
