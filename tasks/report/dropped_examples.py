"""Shows a few texts per reason for which a step dropped documents, looked up in the step's input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from infra.step import Artifact
from tasks.data.records.documents import NUM_EXAMPLES

MAX_CHARS = 220


@dataclass(frozen=True)
class Example:
    """One dropped document, its white space as single spaces."""

    document_id: str
    kept_id: str
    """The document that was kept instead, or the evaluation item that it overlaps with; empty where there is none."""
    text: str


def dropped_examples(dropped_by: Artifact[Any], given: Iterable[Artifact[Any]]) -> dict[str, list[Example]]:
    """Examples by reason, those of smallest id. `given`: the artifacts whose documents the step read."""
    import pyarrow.parquet as pq

    rows = pq.read_table(dropped_by.path("dropped.parquet")).sort_by("id").to_pylist()
    chosen: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        if len(chosen.setdefault(row["reason"], [])) < NUM_EXAMPLES:
            chosen[row["reason"]].append(row)
    texts = _texts({row["id"] for group in chosen.values() for row in group}, given)
    return {
        reason: [Example(row["id"], row["kept_id"], texts[row["id"]]) for row in group]
        for reason, group in sorted(chosen.items())
    }


def _texts(ids: set[str], given: Iterable[Artifact[Any]]) -> dict[str, str]:
    import pyarrow.parquet as pq

    texts: dict[str, str] = {}
    for artifact in given:
        for path in artifact.paths("documents/*.parquet"):
            if ids - set(texts):
                rows = pq.read_table(
                    path, columns=["id", "text"], filters=[("id", "in", sorted(ids - set(texts)))]
                ).to_pylist()
                texts |= {row["id"]: shortened(row["text"]) for row in rows}
    return texts


def shortened(text: str) -> str:
    """The beginning of a text on one line."""
    words = " ".join(text.split())
    return words if len(words) <= MAX_CHARS else f"{words[:MAX_CHARS].rstrip()} …"
