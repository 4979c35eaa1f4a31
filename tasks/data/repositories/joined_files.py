"""Makes the documents of a repository from rows of its files. Runs in executors: imports no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tasks.data.records.documents import (
    PREPARED_COLUMNS,
    REPOSITORY,
    UNBUCKETED,
    arrow_schema,
    content_digest,
    document_id,
)
from tasks.data.repositories.repository_order import Piece, repository_texts

if TYPE_CHECKING:
    import pyarrow as pa

CONCATENATED_COLUMNS = f"{PREPARED_COLUMNS}, members array<struct<id: string, num_chars: bigint>>"
MIN_FILES = 2


def join_files(batches: Iterator[pa.RecordBatch], max_chars: int) -> Iterator[pa.RecordBatch]:
    """CONCATENATED_COLUMNS of a partition that holds whole repositories, sorted by repository and split; one at a time
    in memory."""
    rows = (row for batch in batches for row in batch.to_pylist())
    for (repository, split), group in groupby(rows, key=lambda row: (row["repository"], row["split"])):
        files = list(group)
        if len({row["path"] for row in files}) >= MIN_FILES:
            yield _batch([*_documents(repository, split, files, max_chars)])


def _documents(repository: str, split: str, files: list[dict[str, Any]], max_chars: int) -> Iterator[dict[str, Any]]:
    source = f"{REPOSITORY}/{split}/{repository}"
    licences = {row["id"]: row["licence"] for row in files}
    pieces = [Piece(row["id"], row["source"], row["offset"], row["piece"], row["path"], row["text"]) for row in files]
    for number, (text, members) in enumerate(repository_texts(pieces, max_chars)):
        identity = document_id(source, number, 0)
        named = sorted({licences[piece.id] for piece, _ in members} - {""})
        yield {
            "id": identity,
            "source": source,
            "offset": number,
            "piece": 0,
            "collection": REPOSITORY,
            "url": "",
            "licence": " AND ".join(named),
            "domain": REPOSITORY,
            "lang": "",
            "repository": repository,
            "path": "",
            "text": text,
            "content_digest": content_digest(text),
            "num_chars": len(text),
            "num_bytes": len(text.encode()),
            "cluster": identity,
            "split": split,
            "language": "",
            "quality": None,
            "quality_bucket": UNBUCKETED,
            "members": [{"id": piece.id, "num_chars": size} for piece, size in members],
        }


def _batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    import pyarrow as pa

    member = pa.struct([("id", pa.string()), ("num_chars", pa.int64())])
    return pa.RecordBatch.from_pylist(
        rows, schema=arrow_schema(PREPARED_COLUMNS).append(pa.field("members", pa.list_(member)))
    )
