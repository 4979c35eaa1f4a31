"""Documents with chosen texts and scores as the input of a step, without the steps before it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.files.stored_files import StoredFile, given_file
from tasks.data.records.documents import DOCUMENT_COLUMNS, SCORE_COLUMNS, arrow_schema, content_digest, document_id
from tasks.data.scoring.score_documents import ScoredDocuments

SCORED_COLUMNS = f"{DOCUMENT_COLUMNS}, {SCORE_COLUMNS}"
UNSCORED = dict.fromkeys(("language_score", "quality", "toxicity", "perplexity", "perplexity_percentile", "factuality"))


@dataclass(frozen=True)
class GivenDocuments:
    """What a step needs of an artifact of documents."""

    path: Path
    record: ScoredDocuments

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def files(self, pattern: str) -> list[StoredFile]:
        assert pattern == "documents/*.parquet", pattern
        return [given_file(self.path)]


def given_document(text: str, offset: int, source: str = "web.jsonl", **chosen: Any) -> dict[str, Any]:
    """A row of SCORED_COLUMNS without scores; `chosen` replaces columns."""
    row = {
        "id": document_id(source, offset, chosen.get("piece", 0)),
        "source": source,
        "offset": offset,
        "piece": 0,
        "collection": source,
        "url": "",
        "licence": "",
        "domain": "web",
        "lang": "en",
        "repository": "",
        "path": "",
        "text": text,
        "content_digest": content_digest(text),
        "num_chars": len(text),
        "num_bytes": len(text.encode()),
        "language": "en",
        **UNSCORED,
    }
    return row | chosen


def given_documents(path: Path, documents: list[dict[str, Any]]) -> GivenDocuments:
    """The rows as one file, sorted by id as every step writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(sorted(documents, key=lambda row: row["id"]), schema=arrow_schema(SCORED_COLUMNS))
    pq.write_table(table, path, compression="zstd", row_group_size=4096)
    num_bytes = sum(row["num_bytes"] for row in documents)
    return GivenDocuments(path, ScoredDocuments.model_construct(num_documents=len(documents), num_bytes=num_bytes))
