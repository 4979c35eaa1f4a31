"""Step: records -> documents: plain text, cut into pieces of bounded length; dropped.parquet names the records that gave none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from infra.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.document_files import count_by, count_reasons, names_of, read_documents, write_documents, write_table
from tasks.data.documents import DOCUMENT_COLUMNS, content_digest, cut_pieces, document_id

if TYPE_CHECKING:
    import pyarrow as pa

    from configs.schema import ExtractionRecipe, SparkResources
    from tasks.data.ingest_documents import IngestedDocuments

EXTRACTED_COLUMNS = f"{DOCUMENT_COLUMNS}, reason string"


class ExtractedDocuments(Record):
    num_documents: int
    num_bytes: int
    num_records: int
    """Records that gave at least one document."""
    dropped: dict[str, int]
    documents_by_domain: dict[str, int]
    bytes_by_domain: dict[str, int]


@step(content=("documents/*.parquet", "dropped.parquet"), distributions=("pyspark", "pyarrow"))
def extract_documents(
    *, records: Artifact[IngestedDocuments], recipe: ExtractionRecipe, resources: SparkResources, output: Output
) -> ExtractedDocuments:
    """Every record gives documents or a reason."""
    from pyspark.sql import functions as F

    spark = spark_session(resources)
    num_in = records.record.num_documents
    output.report(Progress(0, num_in, "records", "extracting"))
    frame = read_documents(spark, records.paths("documents/*.parquet"), resources)
    rows = frame.mapInArrow(partial(extract_batches, max_document_chars=recipe.max_document_chars), EXTRACTED_COLUMNS).persist()
    dropped = rows.where("reason <> ''").select("id", "reason", F.lit("").alias("kept_id"))
    write_table(dropped, output.path("dropped.parquet"))
    documents = rows.where("reason = ''").select(*names_of(DOCUMENT_COLUMNS))
    num_records = documents.select("source", "offset").distinct().count()
    counts = count_by(write_documents(documents, output.path("documents"), records.record.num_bytes), "domain")
    rows.unpersist()
    reasons = count_reasons(output.path("dropped.parquet"))
    assert num_in == num_records + sum(reasons.values()), (num_in, num_records, reasons)
    return ExtractedDocuments(
        num_documents=sum(count for count, _ in counts.values()), num_bytes=sum(size for _, size in counts.values()),
        num_records=num_records, dropped=reasons, documents_by_domain={name: count for (name,), (count, _) in counts.items()},
        bytes_by_domain={name: size for (name,), (_, size) in counts.items()},
    )  # fmt: skip


def extract_batches(batches: Iterator[pa.RecordBatch], max_document_chars: int) -> Iterator[pa.RecordBatch]:
    """EXTRACTED_COLUMNS for rows of RECORD_COLUMNS."""
    import pyarrow as pa

    for batch in batches:
        rows = [row for record in batch.to_pylist() for row in _documents(record, max_document_chars)]
        schema = batch.schema.remove(batch.schema.get_field_index("markup")).append(pa.field("reason", pa.string()))
        yield pa.RecordBatch.from_pylist(rows, schema=schema)


def _documents(record: dict[str, Any], max_document_chars: int) -> Iterator[dict[str, Any]]:
    del record["markup"]
    for start, text in cut_pieces(record["text"], max_document_chars):
        if text.strip():
            sizes = {"content_digest": content_digest(text), "num_chars": len(text), "num_bytes": len(text.encode())}
            identity = document_id(record["source"], record["offset"], start)
            yield {**record, "id": identity, "piece": start, "text": text, **sizes, "reason": ""}
