"""Reads source files of role `reference`: the texts that language models are trained on.

They are read and extracted as training text is, but never become documents: only this module reads them. Runs in
executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.data.extraction.plain_text import extract_batches
from tasks.data.readers.source_records import DOCUMENT, read_sources
from tasks.data.records.documents import NUM_HASHES, RECORD_COLUMNS, arrow_schema
from tasks.data.scoring.ngram_counts import SAMPLE_COLUMNS, Sampling, sample_texts

if TYPE_CHECKING:
    import pyarrow as pa

READ = "read"
"""Reason of a row whose num_bytes is the number of records that were read."""


@dataclass(frozen=True)
class Reading:
    """The parameters by which reference files become texts."""

    domains: tuple[str, ...]
    """Domains of the files."""
    max_record_bytes: int
    extraction: dict[str, Any]
    """Arguments of extract_batches."""


def sample_reference(
    batches: Iterator[pa.RecordBatch], reading: Reading, sampling: Sampling
) -> Iterator[pa.RecordBatch]:
    """SAMPLE_COLUMNS for source rows; a record without a text has a reason, and its address and the detail as text."""
    names = arrow_schema(RECORD_COLUMNS).names
    for batch in read_sources(batches, dict.fromkeys(reading.domains, NUM_HASHES), reading.max_record_bytes):
        records, failed = _divided(batch, "stream", DOCUMENT)
        yield _sample_batch([{"reason": READ, "num_bytes": records.num_rows}, *_failures(failed)])
        for extracted in extract_batches(iter([records.select(names)]), **reading.extraction):
            texts, failed = _divided(extracted, "reason", "")
            yield _sample_batch(_failures(failed))
            yield from sample_texts(iter([texts]), sampling)


def _divided(batch: pa.RecordBatch, column: str, value: str) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """The rows that hold the value, and the others."""
    import pyarrow as pa

    holds = [given == value for given in batch.column(column).to_pylist()]
    return batch.filter(pa.array(holds, pa.bool_())), batch.filter(pa.array([not one for one in holds], pa.bool_()))


def _failures(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    details = batch.column("detail").to_pylist() if "detail" in batch.schema.names else [""] * batch.num_rows
    rows = zip(*(batch.column(name).to_pylist() for name in ("id", "source", "offset", "reason")), details, strict=True)
    return [
        {
            "id": identity,
            "reason": reason,
            "text": f"{source} at byte {offset}: {reason}" + (f" ({detail})" if detail else ""),
        }
        for identity, source, offset, reason, detail in rows
    ]


def _sample_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    import pyarrow as pa

    blank = {"id": "", "language": "", "num_bytes": 0, "content_digest": "", "text": ""}
    return pa.RecordBatch.from_pylist([{**blank, **row} for row in rows], schema=arrow_schema(SAMPLE_COLUMNS))
