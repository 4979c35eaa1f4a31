"""Step: held-out documents, repositories and tokenizer -> shards as those for training: what is measured while a phase trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Artifact, Output, step
from tasks.data.documents import VALIDATION
from tasks.data.shard_documents import TokenShards, shard_split

if TYPE_CHECKING:
    from configs.schema import SparkResources
    from tasks.data.concatenate_repositories import ConcatenatedRepositories
    from tasks.data.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.train_tokenizer import TrainedTokenizer


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
    """No phase is trained on these; every domain that lost its held-out documents to a filter is absent."""
    paths = [*documents.paths("documents/*.parquet"), *repositories.paths("documents/*.parquet")]
    return shard_split(paths, VALIDATION, tokenizer, resources, output, multiple_of=1)
