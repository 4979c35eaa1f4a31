"""The steps of benchmarks/training/forgetting.py that the pipeline takes with Spark: documents by domain, tokenizer,
shards of both sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from configs.schema import DataRecipe, TokenizerRecipe
from infra.step import Artifact, Output, Record, step
from model.text.tokenizer_layout import END_OF_TEXT, SPECIAL_TOKENS
from tasks.data.extraction.plain_text import extract_batches
from tasks.data.problems.synthesize_problems import SynthesizedProblems
from tasks.data.readers.source_records import DOCUMENT, read_sources
from tasks.data.records.documents import (
    NUM_HASHES,
    RECORD_COLUMNS,
    TRAIN,
    UNBUCKETED,
    VALIDATION,
    names_of,
    sampling_hash,
)
from tasks.data.shards.shard_documents import TokenShards, shards_of
from tasks.data.shards.tokenize_parts import write_shard
from tasks.data.sources.ingest_documents import sampling_bounds
from tasks.data.sources.list_sources import SourceListing
from tasks.data.sources.source_frame import SOURCE_COLUMNS
from tasks.data.tokenizer.bpe_tokenizer import tokenizer_config, train_bpe, write_json
from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer
from tasks.evaluation.engine import special_token_id

if TYPE_CHECKING:
    import pyarrow as pa

MAX_BYTES = 4_000_000
COLUMNS = ("id", "source", "offset", "piece", "domain", "text")


class DomainTexts(Record):
    num_documents: int
    bytes_by_domain: dict[str, int]


@step(content=("documents.parquet",))
def read_domains(
    *, sources: SourceListing, problems: Artifact[SynthesizedProblems], recipe: DataRecipe, output: Output
) -> DomainTexts:
    """ingest_documents and split_documents without Spark, filters and duplicates; a fifth of every domain is held out
    by hash."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    files = [file for file in sources.files if file.role == "pretrain"]
    rows = [
        {
            **{name: getattr(file, name) for name in SOURCE_COLUMNS},
            "text": list(file.text),
            "max_commits": file.max_commits,
        }
        for file in files
    ]
    bounds = sampling_bounds(files, MAX_BYTES)
    batches = read_sources(iter([pa.RecordBatch.from_pylist(rows)]), bounds, recipe.ingest.max_record_bytes)
    records = (batch.filter(pc.field("stream") == DOCUMENT).select(names_of(RECORD_COLUMNS)) for batch in batches)
    bounds = recipe.extract.model_dump(exclude={"max_failed_share"})
    extracted = [row for batch in extract_batches(records, **bounds) for row in batch.to_pylist()]
    extracted += pq.read_table(problems.path("documents/part-00000.parquet")).to_pylist()
    kept = sorted(({name: row[name] for name in COLUMNS} for row in extracted), key=lambda row: row["id"])
    table = [row | {"split": VALIDATION if sampling_hash(row["id"]) < NUM_HASHES // 5 else TRAIN} for row in kept]
    pq.write_table(pa.Table.from_pylist(table), output.path("documents.parquet"), compression="zstd")
    sizes: dict[str, int] = {}
    for row in table:
        sizes[row["domain"]] = sizes.get(row["domain"], 0) + len(row["text"].encode())
    return DomainTexts(num_documents=len(table), bytes_by_domain=dict(sorted(sizes.items())))


@step(content=("tokenizer.json", "tokenizer_config.json"))
def learn_domain_tokenizer(
    *, texts: Artifact[DomainTexts], recipe: TokenizerRecipe, output: Output
) -> TrainedTokenizer:
    """train_tokenizer without Spark, over all domains, as the pipeline's is."""
    sample, num_chars = [], 0
    for row in _rows(texts, TRAIN):
        if num_chars < recipe.sample_chars:
            sample.append(row["text"])
            num_chars += len(row["text"])
    tokenizer = train_bpe(iter(sample), recipe.num_ordinary_tokens)
    tokenizer.save(str(output.path("tokenizer.json")))
    write_json(tokenizer_config(tokenizer), output.path("tokenizer_config.json"))
    return TrainedTokenizer(
        num_tokens=tokenizer.get_vocab_size(),
        num_ordinary_tokens=recipe.num_ordinary_tokens,
        special_ids={token: special_token_id(tokenizer, token) for token in SPECIAL_TOKENS},
        tokenizer_digest="",
        num_sample_documents=len(sample),
        num_sample_chars=num_chars,
    )


@step(content=("shards/*", "members.parquet"))
def shard_training(
    *, texts: Artifact[DomainTexts], tokenizer: Artifact[TrainedTokenizer], output: Output
) -> TokenShards:
    """shard_documents without Spark."""
    return _shard(texts, TRAIN, tokenizer, output)


@step(content=("shards/*", "members.parquet"))
def shard_held_out(
    *, texts: Artifact[DomainTexts], tokenizer: Artifact[TrainedTokenizer], output: Output
) -> TokenShards:
    """shard_validation without Spark."""
    return _shard(texts, VALIDATION, tokenizer, output)


shard_domains = (shard_training, shard_held_out)


def _shard(
    texts: Artifact[DomainTexts], side: str, tokenizer: Artifact[TrainedTokenizer], output: Output
) -> TokenShards:
    import pyarrow as pa

    end, directory = tokenizer.record.special_ids[END_OF_TEXT], str(output.path("shards/x").parent)
    file, made = tokenizer.file("tokenizer.json"), []
    for domain in sorted(texts.record.bytes_by_domain):
        rows = [
            row | {"shard": f"{domain}-00000", "quality_bucket": UNBUCKETED}
            for row in _rows(texts, side)
            if row["domain"] == domain
        ]
        batches: Iterator[pa.RecordBatch] = iter(pa.Table.from_pylist(rows).combine_chunks().to_batches())
        made += write_shard(batches, directory, file, end, tokenizer.record.num_tokens)
    return _write_members(made, output)


def _write_members(batches: list[pa.RecordBatch], output: Output) -> TokenShards:
    """members.parquet from the rows that shards were written with; their record."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    rows = pa.concat_tables([pa.Table.from_batches([batch]) for batch in batches], promote_options="permissive")
    members = rows.filter(pc.field("file").is_null())
    pq.write_table(members.select(["id", "shard", "sequence"]).sort_by("id"), output.path("members.parquet"))
    sums = members.group_by("shard").aggregate([("id", "count"), ("num_tokens", "sum")]).to_pylist()
    return shards_of({row["shard"]: (row["id_count"], row["num_tokens_sum"]) for row in sums})


def _rows(texts: Artifact[DomainTexts], side: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    table = pq.read_table(texts.path("documents.parquet"))
    return [row for row in table.to_pylist() if row["split"] == side]
