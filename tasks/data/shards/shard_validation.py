"""Step: validation documents, repositories and tokenizer -> shards that are measured while a phase trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, step
from tasks.data.records.document_files import read_documents
from tasks.data.records.documents import VALIDATION
from tasks.data.shards.shard_documents import TokenShards, shard_split

if TYPE_CHECKING:
    from configs.schema import SparkResources
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.repositories.concatenate_repositories import ConcatenatedRepositories
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer


@step(
    content=("shards/*.bin", "shards/*.idx", "shards/*.parquet", "members.parquet"),
    distributions=("pyspark", "pyarrow", "tokenizers", "numpy"),
)
def shard_validation(
    *,
    documents: Artifact[DecontaminatedDocuments],
    repositories: Artifact[ConcatenatedRepositories],
    tokenizer: Artifact[TrainedTokenizer],
    resources: SparkResources,
    output: Output,
) -> TokenShards:
    """No phase is trained on these and no gate judges by them; every domain that lost its documents to a filter is
    absent. Raises ValueError where all did."""
    files = [*documents.files("documents/*.parquet"), *repositories.files("documents/*.parquet")]
    if read_documents(spark_session(resources), files, resources, "split").where(f"split = '{VALIDATION}'").isEmpty():
        raise ValueError(
            "the filters left no document to validate with: raise data.recipe.split.validation_share or bring more "
            "documents"
        )
    return shard_split(files, VALIDATION, tokenizer, resources, output, multiple_of=1)
