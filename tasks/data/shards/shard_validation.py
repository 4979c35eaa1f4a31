"""Step: validation documents, repositories and tokenizer -> shards that are measured while a phase trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Artifact, Output, step
from tasks.data.records.document_files import count_by
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
    """Shard the validation split: no phase trains on it and no gate judges by it. A domain whose documents were all
    filtered out is absent. Raises ValueError where all are."""
    paths = [*documents.paths("documents/*.parquet"), *repositories.paths("documents/*.parquet")]
    if (VALIDATION,) not in count_by(paths, "split"):
        raise ValueError(
            "the filters left no document to validate with: raise data.recipe.split.validation_share or bring more "
            "documents"
        )
    return shard_split(paths, VALIDATION, tokenizer, resources, output, multiple_of=1)
