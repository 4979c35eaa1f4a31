"""Step: filtered and synthetic documents -> those that share no n-gram with an evaluation item; dropped.parquet names the item.

Protected are the evaluation files of the data directory and the very arithmetic problems that gate promotion.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.document_files import count_by, count_reasons, read_documents, write_documents
from tasks.data.documents import TRAIN
from tasks.data.overlap import HIT_COLUMNS, find_overlaps
from tasks.data.protected_items import protected_items

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from configs.schema import DecontaminationRecipe, SparkResources
    from tasks.data.ingest_documents import IngestedDocuments
    from tasks.data.mask_personal_data import MaskedDocuments
    from tasks.data.protected_items import ProtectedItems
    from tasks.data.synthesize_problems import SynthesizedProblems


class DecontaminatedDocuments(Record):
    num_documents: int
    num_bytes: int
    num_protected_items: int
    dropped: dict[str, int]
    train_bytes_by_domain: dict[str, int]
    validation_bytes_by_domain: dict[str, int]


@step(content=("documents/*.parquet", "dropped.parquet"), distributions=("pyspark", "pyarrow", "numpy"))
def decontaminate_documents(
    *,
    documents: Artifact[MaskedDocuments],
    synthetic: Artifact[SynthesizedProblems],
    ingested: Artifact[IngestedDocuments],
    recipe: DecontaminationRecipe,
    resources: SparkResources,
    output: Output,
) -> DecontaminatedDocuments:
    """Drop what overlaps with an evaluation item, whether it is to be trained on or held out. Raises ValueError if nothing is left."""

    spark = spark_session(resources)
    num_in = documents.record.num_documents + synthetic.record.num_documents
    output.report(Progress(0, num_in, "documents", "indexing evaluation items"))
    items = protected_items(ingested, synthetic)
    index = spark.sparkContext.broadcast(items.index(recipe.ngram_size))
    frame = read_documents(spark, [*documents.paths("documents/*.parquet"), *synthetic.paths("documents/*.parquet")], resources)
    hits = frame.select("id", "text").mapInArrow(partial(find_overlaps, index=index), HIT_COLUMNS).persist()
    _write_dropped(hits.where("item >= 0").toArrow(), items, output.path("dropped.parquet"))
    kept = frame.join(hits.where("item < 0").select("id"), "id", "left_semi").select(*frame.columns)
    num_bytes = documents.record.num_bytes + synthetic.record.num_bytes
    counts = count_by(write_documents(kept, output.path("documents"), num_bytes), "split", "domain")
    hits.unpersist()
    index.destroy()
    num_kept = sum(count for count, _ in counts.values())
    reasons = count_reasons(output.path("dropped.parquet"))
    assert num_in == num_kept + sum(reasons.values()), (num_in, num_kept, reasons)
    if not any(split == TRAIN for split, _ in counts):
        raise ValueError(
            f"all {num_in} documents overlap with evaluation items ({reasons}): raise decontaminate.ngram_size or bring other text"
        )
    return DecontaminatedDocuments(
        num_documents=num_kept,
        num_bytes=sum(size for _, size in counts.values()),
        num_protected_items=items.count,
        dropped=reasons,
        train_bytes_by_domain={domain: size for (split, domain), (_, size) in counts.items() if split == TRAIN},
        validation_bytes_by_domain={domain: size for (split, domain), (_, size) in counts.items() if split != TRAIN},
    )


def _write_dropped(hits: pa.Table, items: ProtectedItems, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = hits.column("item").to_pylist()
    columns = {
        "id": hits.column("id").to_pylist(),
        "reason": [items.reason(number) for number in numbers],
        "kept_id": [items.ids[number] for number in numbers],
    }
    schema = pa.schema([(name, pa.string()) for name in columns])
    pq.write_table(pa.table(columns, schema=schema).sort_by("id"), path, compression="zstd")
