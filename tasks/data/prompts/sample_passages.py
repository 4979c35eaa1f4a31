"""Step: masked documents -> passages.parquet, a passage of each of at most `num_documents` training documents.

Executors read the documents and write the table. The recipe bounds its size, so that the driver may read it:
collect_prompts makes search tasks of it. Nothing of held-out documents is in it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.prompts.document_passages import PASSAGE_COLUMNS, keep_passages, take_passages
from tasks.data.records.document_files import map_documents, write_table

if TYPE_CHECKING:
    from configs.schema import PassageRecipe, SparkResources
    from tasks.data.privacy.mask_personal_data import MaskedDocuments


class SampledPassages(Record):
    num_passages: int
    num_documents: int
    """Documents of which they are a sample, the held-out ones included."""


@step(content=("passages.parquet",), distributions=("pyspark", "pyarrow"))
def sample_passages(
    *, documents: Artifact[MaskedDocuments], recipe: PassageRecipe, resources: SparkResources, output: Output
) -> SampledPassages:
    """The documents are those of smallest sampling hash among those with a long enough paragraph."""
    num_in, count = documents.record.num_documents, recipe.num_documents
    output.report(Progress(0, num_in, "documents"))
    spark, files = spark_session(resources), documents.files("documents/*.parquet")
    take, keep = partial(take_passages, count=count), partial(keep_passages, count=count)
    taken = map_documents(spark, files, resources, take, PASSAGE_COLUMNS, "id", "text", "split")
    counts = write_table(taken.repartition(1).mapInArrow(keep, PASSAGE_COLUMNS), output, "passages.parquet")
    return SampledPassages(num_passages=sum(count for count, _ in counts.values()), num_documents=num_in)
