"""Step: training documents, repositories and tokenizer -> Megatron shards, one sequence per document.

A sequence ends in end-of-text. The output is shards/<domain>-00000.bin/.idx, a sidecar shards/<domain>-00000.parquet
(sequence -> document), and members.parquet (id, shard, sequence) sorted by id, for lineage. A shard holds one domain
and a range of ids. The text's size decides how many there are.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from model.text.tokenizer_layout import END_OF_TEXT
from tasks.data.records.document_files import count_by, num_files, read_documents, write_table
from tasks.data.records.documents import TRAIN
from tasks.data.shards.tokenize_parts import SHARD_COLUMNS, read_file_rows, write_shard

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from configs.files.stored_files import StoredFile
    from configs.schema import ShardRecipe, SparkResources
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.repositories.concatenate_repositories import ConcatenatedRepositories
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer


class TokenShards(Record):
    num_documents: int
    num_tokens: int
    """Tokens, including each document's end-of-text."""
    shards: tuple[str, ...]
    domains: dict[str, str]
    """Domain of each shard."""
    tokens_by_domain: dict[str, int]


@step(
    content=("shards/*.bin", "shards/*.idx", "shards/*.parquet", "members.parquet"),
    distributions=("pyspark", "pyarrow", "tokenizers", "numpy"),
)
def shard_documents(
    *,
    documents: Artifact[DecontaminatedDocuments],
    tokenizer: Artifact[TrainedTokenizer],
    recipe: ShardRecipe,
    resources: SparkResources,
    output: Output,
    repositories: Artifact[ConcatenatedRepositories] | None = None,
) -> TokenShards:
    """Tokenize in executors; the bytes do not depend on the number of partitions and cores. `repositories` is None
    where only documents are sharded."""
    sources = [documents] if repositories is None else [documents, repositories]
    files = [file for source in sources for file in source.files("documents/*.parquet")]
    return shard_split(files, TRAIN, tokenizer, resources, output, recipe.multiple_of)


def shard_split(
    files: list[StoredFile],
    side: str,
    tokenizer: Artifact[TrainedTokenizer],
    resources: SparkResources,
    output: Output,
    multiple_of: int,
) -> TokenShards:
    """Write shards, sidecars and members of the documents of one split; every domain has a multiple of `multiple_of`
    shards.

    Raises ValueError where a domain has too few documents for that."""
    spark = spark_session(resources)
    of_side = f"split = '{side}'"
    sized = read_documents(spark, files, resources, "split", "domain", "num_bytes").where(of_side)
    sizes = {domain: size for (domain,), (_, size) in count_by(sized, "domain").items()}
    output.report(Progress(0, sum(sizes.values()), "bytes", "tokenizing"))
    columns = ("id", "source", "offset", "piece", "quality_bucket", "text", "domain")
    texts = read_documents(spark, files, resources, *columns, "split").where(of_side)
    frame = assign_shards(texts.select(*columns), count_shards(sizes, multiple_of))
    write = partial(
        write_shard,
        directory=f"{output.uri}/shards",
        tokenizer=tokenizer.file("tokenizer.json"),
        end_of_text_id=tokenizer.record.special_ids[END_OF_TEXT],
        vocab_size=tokenizer.record.num_tokens,
    )
    made, _ = write_shards(frame.mapInArrow(write, SHARD_COLUMNS), output)
    check_shards(made, multiple_of)
    return made


def count_shards(sizes: dict[str, int], multiple_of: int) -> dict[str, int]:
    """Shards per domain by its bytes, rounded up to a multiple of `multiple_of`."""
    return {domain: -(-num_files(size) // multiple_of) * multiple_of for domain, size in sorted(sizes.items())}


def check_shards(made: TokenShards, multiple_of: int) -> None:
    """Raises ValueError for a domain with so few documents that one of its ranges of ids has none."""
    for domain in sorted({*made.domains.values()}):
        num_shards = sum(1 for other in made.domains.values() if other == domain)
        if num_shards % multiple_of:
            raise ValueError(
                f"domain {domain} fills {num_shards} shards, not a multiple of shards.multiple_of ({multiple_of}): it "
                f"has too few documents; "
                "lower shards.multiple_of or bring more text"
            )


def assign_shards(frame: DataFrame, counts: dict[str, int]) -> DataFrame:
    """Documents in one partition per shard, sorted by id."""
    from pyspark.sql import functions as F

    firsts = dict(zip(counts, (sum(list(counts.values())[:number]) for number in range(len(counts))), strict=True))
    leading = F.conv(F.substring("id", 1, 8), 16, 10).cast("long")
    bucket = F.shiftright(leading * _by_domain(counts), 32)
    placed = frame.withColumns({"shard": shard_name(bucket), "number": _by_domain(firsts) + bucket})
    return placed.repartitionById(sum(counts.values()), placed["number"].cast("int")).sortWithinPartitions("id")


def shard_name(bucket: Column) -> Column:
    """The name of a domain's shard, with five digits or more."""
    from pyspark.sql import functions as F

    return F.format_string("%s-%05d", F.col("domain"), bucket)


def _by_domain(values: dict[str, int]) -> Column:
    from pyspark.sql import functions as F

    entries = [F.lit(part) for domain, value in values.items() for part in (domain, value)]
    return F.create_map(*entries)[F.col("domain")].cast("long")


def write_shards(rows: DataFrame, output: Output) -> tuple[TokenShards, int]:
    """Runs the tasks that write shards (SHARD_COLUMNS), writes members.parquet, and counts the trained tokens."""
    from pyspark import StorageLevel
    from pyspark.sql import functions as F

    written = rows.persist(StorageLevel.DISK_ONLY)  # read for files, sums and members
    output.add(read_file_rows(row["file"] for row in written.where("file is not null").select("file").collect()))
    sequences = written.where("file is null")
    write_table(sequences.select("id", "shard", "sequence"), output, "members.parquet")
    sums = (F.sum(name).alias(name) for name in ("num_tokens", "num_trained_tokens"))
    totals = sequences.groupBy("shard").agg(F.count("id").alias("num_documents"), *sums).collect()
    written.unpersist()
    num_trained = sum(row["num_trained_tokens"] for row in totals)
    return shards_of({row["shard"]: (row["num_documents"], row["num_tokens"]) for row in totals}), num_trained


def shards_of(totals: dict[str, tuple[int, int]]) -> TokenShards:
    """The record of shards with (documents, tokens)."""
    shards = sorted(totals)
    domains = {shard: shard.rsplit("-", 1)[0] for shard in shards}
    return TokenShards(
        num_documents=sum(count for count, _ in totals.values()),
        num_tokens=sum(count for _, count in totals.values()),
        shards=tuple(shards),
        domains=domains,
        tokens_by_domain={
            domain: sum(totals[shard][1] for shard in shards if domains[shard] == domain)
            for domain in sorted({*domains.values()})
        },
    )
