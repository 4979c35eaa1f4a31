"""Step: filtered documents -> the same with personal data and secrets replaced by a placeholder of their kind.

masked.parquet counts them. tasks/data/privacy/personal_data.py says what is recognised, what is not, and why code
keeps its numbers. The replaced text remains in the row of the same id in the step's input.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.privacy.personal_data import COUNT_COLUMNS, KINDS, mask_batches
from tasks.data.records.document_files import map_documents, write_documents, write_table
from tasks.data.records.documents import PREPARED_COLUMNS, names_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.schema import PersonalDataRecipe, SparkResources
    from tasks.data.filtering.filter_documents import FilteredDocuments


class MaskedDocuments(Record):
    num_documents: int
    num_bytes: int
    """Bytes of the text with placeholders."""
    num_masked_documents: int
    masked: dict[str, int]
    """Replaced spans by kind."""


@step(
    content=("documents/*.parquet", "masked.parquet"),
    distributions=("pyspark", "pyarrow", "numpy", "phonenumbers", "python-stdnum", "detect-secrets", "tld"),
)
def mask_personal_data(
    *, documents: Artifact[FilteredDocuments], recipe: PersonalDataRecipe, resources: SparkResources, output: Output
) -> MaskedDocuments:
    """masked.parquet has a row for each changed document: its id and the places by kind."""
    from pyspark import StorageLevel
    from pyspark.sql import functions as F

    num_in = documents.record.num_documents
    output.report(Progress(0, num_in, "documents"))
    spark, files = spark_session(resources), documents.files("documents/*.parquet")
    mask, columns = partial(mask_batches, kinds=recipe.kinds), f"{PREPARED_COLUMNS}, {COUNT_COLUMNS}"
    mapped = map_documents(spark, files, resources, mask, columns, *names_of(PREPARED_COLUMNS))
    masked = mapped.persist(StorageLevel.DISK_ONLY)  # read for two tables
    _, counts = write_documents(
        masked.select(*names_of(PREPARED_COLUMNS)), output, "documents", documents.record.num_bytes
    )
    is_changed = F.greatest(*KINDS) > 0
    changed = masked.where(is_changed).select("id", *KINDS)
    write_table(changed, output, "masked.parquet")
    num_masked, by_kind = count_masked(changed)
    masked.unpersist()
    num_documents = sum(count for count, _ in counts.values())
    assert num_documents == num_in, (num_in, num_documents)
    return MaskedDocuments(
        num_documents=num_documents,
        num_bytes=sum(size for _, size in counts.values()),
        num_masked_documents=num_masked,
        masked={kind: by_kind[kind] for kind in recipe.kinds},
    )


def count_masked(masked: DataFrame) -> tuple[int, dict[str, int]]:
    """Rows of `masked` (KINDS), and what was masked of each kind."""
    from pyspark.sql import functions as F

    sums = (F.coalesce(F.sum(kind), F.lit(0)).alias(kind) for kind in KINDS)
    (row,) = masked.agg(F.count("id").alias("num_rows"), *sums).collect()
    return row["num_rows"], {kind: row[kind] for kind in KINDS}
