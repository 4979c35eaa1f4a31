"""Shows a few texts per reason for which a step dropped documents, looked up in the step's input; none that was taken
down, nor one that resembles it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from infra.step import Artifact
from tasks.data.filtering.blocked_documents import BLOCKED, DOCUMENT_ID, BlockedDocuments
from tasks.data.records.documents import NUM_EXAMPLES
from tasks.data.records.documents_by_id import read_by_id
from tasks.data.records.stored_tables import open_parquet

if TYPE_CHECKING:
    from configs.files.stored_files import StoredFile

DOCUMENT_FILES = "documents/*.parquet"
MAX_CHARS = 220
BATCH_ROWS = 1 << 16
MAX_ROWS = 1 << 22
"""Rows that are looked through for examples: 200 MB of a table."""


@dataclass(frozen=True)
class Example:
    """One dropped document, its white space as single spaces."""

    document_id: str
    kept_id: str
    """The document that was kept instead, or the evaluation item that it overlaps with; empty where there is none."""
    text: str


def dropped_examples(
    dropped_by: Artifact[Any],
    given: Sequence[Artifact[Any]],
    blocked: BlockedDocuments | None,
    extracted: Artifact[Any],
) -> dict[str, list[Example]]:
    """Examples by reason, those of smallest id that the block list does not name, nor what was kept in their place.
    `given`: the artifacts whose documents the step read; `extracted`: that of the documents with all paragraphs."""
    counts = {reason: count for reason, count in dropped_by.record.dropped.items() if reason != BLOCKED}
    chosen = first_by_reason(dropped_by.file("dropped.parquet"), counts, NUM_EXAMPLES)
    files = [file for artifact in given for file in artifact.files(DOCUMENT_FILES)]
    named = (identity for rows in chosen.values() for row in rows for identity in (row["id"], row["kept_id"]))
    hidden = taken_down(named, [*files, *extracted.files(DOCUMENT_FILES)], blocked)
    shown = {
        reason: [row for row in rows if not {row["id"], row["kept_id"]} & hidden] for reason, rows in chosen.items()
    }
    return {
        reason: [Example(row["id"], row["kept_id"], _text(row["id"], files)) for row in rows]
        for reason, rows in sorted(shown.items())
        if rows
    }


def taken_down(ids: Iterable[str], files: list[StoredFile], blocked: BlockedDocuments | None) -> set[str]:
    """Those of a few ids whose document is in the block list as any of the files has it."""
    if blocked is None:
        return set()
    numbers = sorted({int(identity, 16) for identity in ids if DOCUMENT_ID.fullmatch(identity)})
    batches = read_by_id(files, np.array(numbers, np.uint64), list(blocked.by_column))
    return {row["id"] for batch in batches for row in batch.to_pylist() if blocked.lists(row)}


def first_by_reason(file: StoredFile, counts: Mapping[str, int], num_each: int) -> dict[str, list[dict[str, Any]]]:
    """The first rows of each reason in a table of ids; `counts` are its rows by reason. A reason that is not among the
    first MAX_ROWS has no example."""
    import pyarrow as pa

    missing = {reason: min(count, num_each) for reason, count in counts.items() if count}
    chosen: dict[str, list[dict[str, Any]]] = {}
    num_read = 0
    with open_parquet(file) as table:
        for batch in table.iter_batches(BATCH_ROWS):
            reasons = batch.column("reason").to_numpy(zero_copy_only=False)
            for reason in [reason for reason, count in missing.items() if count]:
                rows = batch.take(pa.array(np.flatnonzero(reasons == reason)[: missing[reason]])).to_pylist()
                if rows:
                    chosen.setdefault(reason, []).extend(rows)
                    missing[reason] -= len(rows)
            num_read += batch.num_rows
            if num_read >= MAX_ROWS or not any(missing.values()):
                break
    return chosen


def _text(document_id: str, files: list[StoredFile]) -> str:
    """The beginning of a document's text, read from the one row group that can hold it."""
    for batch in read_by_id(files, np.array([int(document_id, 16)], np.uint64), ["id", "text"]):
        return shortened(batch.column("text")[0].as_py())
    raise AssertionError(f"document {document_id} is in none of {len(files)} files")


def shortened(text: str) -> str:
    """The beginning of a text on one line."""
    words = " ".join(text.split())
    return words if len(words) <= MAX_CHARS else f"{words[:MAX_CHARS].rstrip()} …"
