"""Step: training documents, repositories and tokenizer -> Megatron shards, one sequence per document, ending in end-of-text.

Out: shards/<domain>-00000.bin/.idx, a sidecar shards/<domain>-00000.parquet (sequence -> document), members.parquet (id, shard,
sequence) sorted by id, for lineage. A shard holds one domain and a range of ids; how many there are follows from the text's size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from model.tokenizer_layout import END_OF_TEXT
from tasks.data.document_files import count_by, num_files, read_documents
from tasks.data.documents import TRAIN
from tasks.data.tokenize_parts import SHARD_COLUMNS, write_shard

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from configs.schema import SparkResources
    from tasks.data.concatenate_repositories import ConcatenatedRepositories
    from tasks.data.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.train_tokenizer import TrainedTokenizer


class TokenShards(Record):
    num_documents: int
    num_tokens: int
    """Each document's end-of-text included."""
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
    resources: SparkResources,
    output: Output,
    repositories: Artifact[ConcatenatedRepositories] | None = None,
) -> TokenShards:
    """Tokenize in executors; the same bytes for any number of partitions and cores. None for `repositories` shards documents alone."""
    sources = [documents] if repositories is None else [documents, repositories]
    paths = [path for source in sources for path in source.paths("documents/*.parquet")]
    return shard_split(paths, TRAIN, tokenizer, resources, output)


def shard_split(
    paths: list[Path], side: str, tokenizer: Artifact[TrainedTokenizer], resources: SparkResources, output: Output
) -> TokenShards:
    """Shards, sidecars and members of the documents on one side of the split."""
    counts = count_by(paths, "split", "domain")
    sizes = {domain: size for (split, domain), (_, size) in counts.items() if split == side}
    output.report(Progress(0, sum(sizes.values()), "bytes", "tokenizing"))
    directory = output.path("shards/x").parent
    training = read_documents(spark_session(resources), paths, resources).where(f"split = '{side}'")
    frame = assign_shards(training.select("id", "source", "offset", "piece", "quality_bucket", "text", "domain"), sizes)
    write = partial(
        write_shard, directory=str(directory), tokenizer_path=str(tokenizer.path("tokenizer.json")),
        end_of_text_id=tokenizer.record.special_ids[END_OF_TEXT], vocab_size=tokenizer.record.num_tokens,
    )  # fmt: skip
    return write_tables(frame.mapInArrow(write, SHARD_COLUMNS).toArrow(), output)


def assign_shards(frame: DataFrame, sizes: dict[str, int]) -> DataFrame:
    """Documents in one partition per shard, sorted by id."""
    from pyspark.sql import functions as F

    counts = {domain: num_files(size) for domain, size in sorted(sizes.items())}
    firsts = dict(zip(counts, (sum(list(counts.values())[:number]) for number in range(len(counts))), strict=True))
    leading = F.conv(F.substring("id", 1, 8), 16, 10).cast("long")
    bucket = F.shiftright(leading * _by_domain(counts), 32)
    name = F.concat_ws("-", "domain", F.lpad(bucket.cast("string"), 5, "0"))
    placed = frame.withColumns({"shard": name, "number": _by_domain(firsts) + bucket})
    return placed.repartitionById(sum(counts.values()), placed["number"].cast("int")).sortWithinPartitions("id")


def _by_domain(values: dict[str, int]) -> Column:
    from pyspark.sql import functions as F

    entries = [F.lit(part) for domain, value in values.items() for part in (domain, value)]
    return F.create_map(*entries)[F.col("domain")].cast("long")


def write_tables(members: pa.Table, output: Output) -> TokenShards:
    """Sidecars and members.parquet from one row per sequence, in any order."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    members = members.sort_by([("shard", "ascending"), ("sequence", "ascending")])
    shards = sorted(set(members["shard"].to_pylist()))
    for shard in shards:
        sidecar = members.filter(pc.field("shard") == shard).drop_columns(["shard"])
        pq.write_table(sidecar, output.path(f"shards/{shard}.parquet"), compression="zstd")
    lookup = members.select(["id", "shard", "sequence"]).sort_by([("id", "ascending")])
    pq.write_table(lookup, output.path("members.parquet"), compression="zstd")
    domains = {shard: shard.rsplit("-", 1)[0] for shard in shards}
    sums = members.group_by("shard").aggregate([("num_tokens", "sum")]).to_pylist()
    totals = {row["shard"]: row["num_tokens_sum"] for row in sums}
    return TokenShards(
        num_documents=members.num_rows,
        num_tokens=sum(totals.values()),
        shards=tuple(shards),
        domains=domains,
        tokens_by_domain={
            domain: sum(totals[shard] for shard in shards if domains[shard] == domain) for domain in sorted({*domains.values()})
        },
    )
