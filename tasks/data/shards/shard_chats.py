"""Step: conversations and tokenizer -> Megatron shards of the domain `chat`, with a mask of the trained tokens.

There is one sequence per conversation. The output is shards/chat-00000.bin/.idx/.mask, sidecar and members.parquet as
shard_documents writes them. Held-out conversations are left out.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, step
from tasks.data.records.document_files import count_by, read_documents
from tasks.data.records.documents import CHAT, TRAIN, UNBUCKETED
from tasks.data.shards.shard_documents import TokenShards, assign_shards, check_shards, count_shards, write_shards
from tasks.data.shards.tokenize_chats import write_chat_shard
from tasks.data.shards.tokenize_parts import SHARD_COLUMNS

if TYPE_CHECKING:
    from configs.schema import ShardRecipe, SparkResources
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer


class ChatShards(TokenShards):
    num_trained_tokens: int
    """Tokens that assistants write, and the role tokens that close their turns."""


@step(
    content=("shards/*.bin", "shards/*.idx", "shards/*.mask", "shards/*.parquet", "members.parquet"),
    distributions=("pyspark", "pyarrow", "tokenizers", "numpy"),
)
def shard_chats(
    *,
    chats: Artifact[Any],
    tokenizer: Artifact[TrainedTokenizer],
    recipe: ShardRecipe,
    resources: SparkResources,
    output: Output,
) -> ChatShards:
    """Tokenize in executors; the bytes do not depend on the number of partitions and cores. `chats` holds
    conversations as collect_chats leaves them."""
    from pyspark.sql import functions as F

    spark, files = spark_session(resources), chats.files("chats/*.parquet")
    training = read_documents(spark, files, resources).where(f"split = '{TRAIN}'")
    ((_, num_bytes),) = count_by(training).values()
    output.report(Progress(0, num_bytes, "bytes", "tokenizing"))
    bucket = F.lit(UNBUCKETED).alias("quality_bucket")
    columns = ("id", "source", "offset", "piece", bucket, "messages", "tools", F.lit(CHAT).alias("domain"))
    frame = assign_shards(training.select(*columns), count_shards({CHAT: num_bytes}, recipe.multiple_of))
    write = partial(
        write_chat_shard,
        directory=f"{output.uri}/shards",
        tokenizer=tokenizer.file("tokenizer.json"),
        vocab_size=tokenizer.record.num_tokens,
    )
    made, num_trained = write_shards(frame.mapInArrow(write, SHARD_COLUMNS), output)
    check_shards(made, recipe.multiple_of)
    return ChatShards(**made.model_dump(), num_trained_tokens=num_trained)
