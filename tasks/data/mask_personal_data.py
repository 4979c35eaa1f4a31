"""Step: filtered documents -> the same with personal data replaced by a placeholder of its kind; masked.parquet counts what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.document_files import count_by, names_of, read_documents, write_documents
from tasks.data.documents import PREPARED_COLUMNS

if TYPE_CHECKING:
    from configs.schema import PersonalDataRecipe, SparkResources
    from tasks.data.filter_documents import FilteredDocuments


class MaskedDocuments(Record):
    num_documents: int
    num_bytes: int


@step(content=("documents/*.parquet",), distributions=("pyspark", "pyarrow"))
def mask_personal_data(
    *, documents: Artifact[FilteredDocuments], recipe: PersonalDataRecipe, resources: SparkResources, output: Output
) -> MaskedDocuments:
    """SEAM."""
    num_in = documents.record.num_documents
    output.report(Progress(0, num_in, "documents"))
    frame = read_documents(spark_session(resources), documents.paths("documents/*.parquet"), resources).select(*names_of(PREPARED_COLUMNS))
    counts = count_by(write_documents(frame, output.path("documents"), documents.record.num_bytes), "domain")
    return MaskedDocuments(num_documents=num_in, num_bytes=sum(size for _, size in counts.values()))
