"""Steps of benchmarks/tokenize: a tokenizer for both sides, and JSONL.gz files to documents to shards."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.files.stored_files import given_file
from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Record, step
from model.text.tokenizer_layout import END_OF_TEXT
from tasks.data.records.documents import TRAIN, UNBUCKETED
from tasks.data.shards.shard_documents import TokenShards, shard_split
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer
from tests.support.data_inputs import RESOURCES, SHARED_DATA, write_jsonl

NUM_ORDINARY_TOKENS = 32_000
NUM_WORKERS = 2


class Sample(Record):
    texts: tuple[str, ...]


@step(content=("tokenizer.json",))
def learn(*, recipe: Sample, output: Output) -> TrainedTokenizer:
    """A tokenizer for both sides."""
    tokenizer = train_bpe(iter(recipe.texts), NUM_ORDINARY_TOKENS)
    tokenizer.save(str(output.path("tokenizer.json")))
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    return TrainedTokenizer(
        num_tokens=tokenizer.get_vocab_size(),
        num_ordinary_tokens=NUM_ORDINARY_TOKENS,
        special_ids={END_OF_TEXT: end},
        tokenizer_digest="",
        num_sample_documents=len(recipe.texts),
        num_sample_chars=sum(map(len, recipe.texts)),
    )


class Source(Record):
    directory: str


@step(content=("documents/*", "shards/*", "members.parquet"))
def shard_files(*, tokenizer: Artifact[TrainedTokenizer], recipe: Source, output: Output) -> TokenShards:
    """JSONL.gz to documents, and documents to shards."""
    from pyspark.sql import functions as F

    spark = spark_session(RESOURCES)
    records = spark.read.schema("id string, text string").json(
        [path.as_uri() for path in files_of(Path(recipe.directory))]
    )
    documents = output.path("documents")
    records.select(
        F.substring(F.sha2("id", 256), 1, 16).alias("id"),
        "text",
        F.lit("jsonl").alias("source"),
        F.lit(0).cast("long").alias("offset"),
        F.lit(0).cast("long").alias("piece"),
        F.lit("web").alias("domain"),
        F.lit(TRAIN).alias("split"),
        F.lit(UNBUCKETED).alias("quality_bucket"),
        F.octet_length("text").cast("long").alias("num_bytes"),
    ).write.parquet(documents.as_uri())
    # Two shards: as many as workers, which the text alone would not fill.
    return shard_split(
        [given_file(path) for path in sorted(documents.glob("*.parquet"))],
        TRAIN,
        tokenizer,
        RESOURCES,
        output,
        NUM_WORKERS,
    )


def files_of(source: Path) -> list[Path]:
    """What both sides read."""
    return sorted(source.glob("*.jsonl.gz"))


def shared_corpus(directory: Path) -> Path:
    """About 50 MB of prose, code and many languages."""
    documents: list[dict[str, str]] = []
    for folder in ("text", "code", "multilingual"):
        for path in sorted((SHARED_DATA / folder).glob("*.jsonl.gz")):
            for number, record in enumerate(records_of(path)):
                text = max((value for value in record.values() if isinstance(value, str)), key=len, default="")
                documents.append({"id": f"{path.name}-{number}", "text": text})
    if not documents:
        raise SystemExit(f"no texts in {SHARED_DATA}: name a folder with --input")
    for part in range(NUM_WORKERS):
        write_jsonl(directory / f"part-{part}.jsonl.gz", documents[part::NUM_WORKERS])
    return directory


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)
