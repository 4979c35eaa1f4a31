"""Documents with chosen texts and scores as the input of a step, without the steps before it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.files.stored_files import StoredFile, given_file
from tasks.data.privacy.mask_personal_data import MaskedDocuments
from tasks.data.records.documents import (
    DOCUMENT_COLUMNS,
    PREPARED_COLUMNS,
    SCORE_COLUMNS,
    TRAIN,
    arrow_schema,
    content_digest,
    document_id,
)
from tasks.data.scoring.score_documents import ScoredDocuments

SCORED_COLUMNS = f"{DOCUMENT_COLUMNS}, {SCORE_COLUMNS}"
UNSCORED = dict.fromkeys(("language_score", "quality", "toxicity", "perplexity", "perplexity_percentile", "factuality"))


@dataclass(frozen=True)
class GivenDocuments:
    """What a step needs of an artifact of documents."""

    path: Path
    record: ScoredDocuments | MaskedDocuments

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


def given_masked(path: Path, texts: Mapping[str, str], held_out: Collection[str] = ()) -> GivenDocuments:
    """Texts by the names of their sources, as masking leaves them; those of `held_out` are in no training split."""
    schema = arrow_schema(PREPARED_COLUMNS)
    blank = {field.name: "" if pa.types.is_string(field.type) else 0 for field in schema}
    table = [
        blank
        | {"id": document_id(name, 0, 0), "source": name, "text": text, "num_bytes": len(text), "domain": "web"}
        | {"split": "test" if name in held_out else TRAIN}
        for name, text in texts.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(table, schema=schema).sort_by("id"), path)
    sizes = {"num_documents": len(texts), "num_bytes": sum(map(len, texts.values()))}
    return GivenDocuments(path, MaskedDocuments.model_construct(**sizes))
