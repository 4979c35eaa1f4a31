"""Inputs of single data steps without the steps before them: document rows as the artifact that a step reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.files.stored_files import StoredFile, given_file
from infra.step import digest_of
from tasks.data.records.documents import RECORD_COLUMNS, SCORE_COLUMNS, arrow_schema, content_digest, document_id

COLUMNS = f"{RECORD_COLUMNS}, {SCORE_COLUMNS}, cluster string"


@dataclass(frozen=True)
class TableArtifact:
    """The side of an artifact that a data step reads."""

    path: Path
    digest: str
    record: SimpleNamespace

    def files(self, pattern: str) -> list[StoredFile]:
        return [given_file(self.path)]


def document_row(text: str, offset: int, **given: Any) -> dict[str, Any]:
    """A row of COLUMNS: a web page of one source; its offset decides its id."""
    source = given.get("source", "pages.warc")
    identity = document_id(source, offset, 0)
    row = dict.fromkeys(("url", "licence", "repository", "path", "markup"), "")
    return {
        **row,
        "id": identity,
        "source": source,
        "offset": offset,
        "piece": 0,
        "collection": "pages",
        "domain": "web",
        "lang": "en",
        "text": text,
        "content_digest": content_digest(text),
        "num_chars": len(text),
        "num_bytes": len(text.encode()),
        "language": "en",
        "cluster": identity,
        **given,
    }


def documents_artifact(rows: list[dict[str, Any]], path: Path) -> TableArtifact:
    """These rows as one file, sorted by id as every step writes them."""
    schema = arrow_schema(COLUMNS)
    table = pa.Table.from_pylist(
        [{name: row.get(name) for name in schema.names} for row in sorted(rows, key=lambda row: row["id"])], schema
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    record = SimpleNamespace(num_documents=len(rows), num_bytes=sum(row["num_bytes"] for row in rows))
    return TableArtifact(path, digest_of(sorted(row["id"] + row["content_digest"] for row in rows)), record)
