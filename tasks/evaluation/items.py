"""Evaluation items: the one table that gates read, its schema and the figures computed from it.

`items.parquet` is sorted by item id. A validation item is one document, an arithmetic item one generated problem.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow

VALIDATION = "validation"
ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class Item:
    """One row."""

    item_id: str
    kind: str
    """VALIDATION or ARITHMETIC."""
    domain: str
    prompt_digest: str
    """sha256 of what the model was asked: the document's text or the problem's prompt."""
    output: str
    """The generated answer; empty for a validation document."""
    score: float
    """Bits per byte of a validation document (lower is better); 1 or 0 of a problem."""
    log_probability: float
    """Natural logarithm, summed over the document's tokens or the generated ones."""
    num_bytes: int
    """UTF-8 bytes of the document or of the output."""

    @property
    def bits(self) -> float:
        return -self.log_probability / math.log(2)


def text_digest(text: str) -> str:
    """sha256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def suite_digest(prompt_digests: Mapping[str, str]) -> str:
    """sha256 over item ids and prompt digests: equal suites can be compared item by item."""
    lines = (f"{item_id} {digest}\n" for item_id, digest in sorted(prompt_digests.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write_items(path: Path, items: Iterable[Item]) -> None:
    """Write items sorted by id; an id that occurs twice is an error."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = sorted(items, key=lambda item: item.item_id)
    ids = [row.item_id for row in rows]
    assert len(set(ids)) == len(ids), f"item ids occur twice: {sorted({name for name in ids if ids.count(name) > 1})[:5]}"
    pq.write_table(pa.Table.from_pylist([vars(row) for row in rows], schema=_schema()), path)


def read_items(path: Path) -> list[Item]:
    """The items of one evaluation, sorted by id. Raises ValueError when the file is not such a table."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if not table.schema.equals(_schema()):
        raise ValueError(f"{path} is not a table of evaluation items (columns {table.column_names}): evaluate the checkpoint again")
    return [Item(**row) for row in table.to_pylist()]


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    texts = ("item_id", "kind", "domain", "prompt_digest", "output")
    return pa.schema(
        [*((name, pa.string()) for name in texts), ("score", pa.float64()), ("log_probability", pa.float64()), ("num_bytes", pa.int64())]
    )


def validation_items(items: Iterable[Item]) -> list[Item]:
    """The validation documents among the items; none is an error, since no bits per byte would follow."""
    found = [item for item in items if item.kind == VALIDATION]
    if not found:
        raise ValueError("the evaluation holds no validation document: bits per byte is missing, evaluate with validation documents")
    return found


def bits_per_byte(items: Iterable[Item]) -> float:
    """Summed bits over summed bytes of the validation documents; not finite where one log-probability is not."""
    found = validation_items(items)
    return sum(item.bits for item in found) / sum(item.num_bytes for item in found)


def bits_per_byte_by_domain(items: Iterable[Item]) -> dict[str, float]:
    """Bits per byte of every domain that has validation documents, by name."""
    found = validation_items(items)
    return {name: bits_per_byte(item for item in found if item.domain == name) for name in sorted({item.domain for item in found})}


def arithmetic_accuracy(items: Iterable[Item]) -> float:
    """Share of the problems answered rightly; no problem is an error."""
    scores = [item.score for item in items if item.kind == ARITHMETIC]
    if not scores:
        raise ValueError("the evaluation holds no arithmetic problem: the accuracy is missing, evaluate with generated problems")
    return sum(scores) / len(scores)
