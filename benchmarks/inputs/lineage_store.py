"""Toy steps with the names, files and order of the real ones, on random pages: a store for lineage to be asked of."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infra.step import Artifact, Output, Record, step
from infra.storage.store import Store
from tasks.data.packing.packed_order import part_name as order_name
from tasks.data.packing.packed_order import write_part
from tasks.data.records.documents import document_id
from tasks.data.records.parquet_parts import part_name, write_rows
from tests.lineage.toy_release import Packed, Trained, commit

ROWS_PER_PART = 100_000
BATCH_ROWS = 1024
SOURCE = "pages.jsonl"
SHARD = "web-00000"


class Linked(Record):
    """A step that has all pages; its name tells its digest from that of the others."""

    step: str


class Pages(Record):
    """Documents in the order of their ids, in files that are written once and linked into each artifact."""

    directory: str
    num_documents: int
    text_bytes: int

    def write(self) -> None:
        """Write the files."""
        rows = numbered_ids(self.num_documents)
        for part, begin in enumerate(range(0, len(rows), ROWS_PER_PART)):
            batches = self._batches(rows[begin : begin + ROWS_PER_PART])
            write_rows(next(batches), batches, f"{self.directory}/{part_name(part)}", ())

    def _batches(self, rows: list[tuple[str, int]]) -> Iterator[pa.RecordBatch]:
        for begin in range(0, len(rows), BATCH_ROWS):
            chunk = rows[begin : begin + BATCH_ROWS]
            texts = [base64.b64encode(os.urandom(self.text_bytes * 3 // 4)).decode() for _ in chunk]
            columns = {"id": [identity for identity, _ in chunk], "source": [SOURCE] * len(chunk)}
            columns |= {"offset": [number for _, number in chunk], "piece": [0] * len(chunk)}
            columns |= {"url": [url_of(number) for _, number in chunk], "text": texts, "split": ["train"] * len(chunk)}
            yield pa.RecordBatch.from_pydict(columns)

    def link(self, output: Output, name: str) -> Linked:
        """Make the files those of an artifact."""
        for path in sorted(Path(self.directory).iterdir()):
            os.link(path, output.path(f"documents/{path.name}"))
        return Linked(step=name)


def numbered_ids(num_documents: int) -> list[tuple[str, int]]:
    """Ids in order, and the number of the page of each."""
    return sorted((document_id(SOURCE, number, 0), number) for number in range(num_documents))


def url_of(number: int) -> str:
    """Address of a page."""
    return f"https://site-{number % 997}.example/page/{number}"


@step(content=("documents/*",))
def ingest_documents(*, recipe: Pages, output: Output) -> Linked:
    """What the source holds."""
    return recipe.link(output, "ingest")


@step(content=("documents/*",))
def extract_documents(*, recipe: Pages, documents: Artifact, output: Output) -> Linked:
    """Drops nothing."""
    return recipe.link(output, "extract")


@step(content=("documents/*",))
def deduplicate_documents(*, recipe: Pages, documents: Artifact, output: Output) -> Linked:
    """Drops nothing."""
    return recipe.link(output, "deduplicate")


@step(content=("documents/*",))
def filter_documents(*, recipe: Pages, documents: Artifact, output: Output) -> Linked:
    """Drops nothing."""
    return recipe.link(output, "filter")


@step(content=("documents/*",))
def split_documents(*, recipe: Pages, documents: Artifact, output: Output) -> Linked:
    """Holds nothing out."""
    return recipe.link(output, "split")


@step(content=("shards/*", "members.parquet"))
def shard_documents(*, recipe: Pages, documents: Artifact, output: Output) -> Pages:
    """One shard, without its tokens."""
    parts = sorted(Path(recipe.directory).iterdir())
    ids = pa.concat_tables(pq.read_table(path, columns=["id"]) for path in parts)["id"].combine_chunks()
    columns = {"id": ids, "shard": pa.array([SHARD] * len(ids)), "sequence": pa.array(range(len(ids)))}
    batches = iter(pa.table(columns).to_batches(max_chunksize=BATCH_ROWS))
    write_rows(next(batches), batches, str(output.path("members.parquet")), ())
    output.path(f"shards/{SHARD}.parquet").write_bytes(b"")
    return recipe


@step(content=("order-*.npy", "packing.json"))
def pack_phase(*, shards: Artifact[Pages], output: Output) -> Packed:
    """Every document once, in a random order."""
    order = np.zeros((shards.record.num_documents, 6), dtype=np.int64)
    order[:, 1], order[:, 3] = np.random.default_rng(46).permutation(len(order)), 300
    write_part(output.path(order_name(0)), order)
    output.path("packing.json").write_text(json.dumps({"shards": [SHARD]}))
    return Packed()


@step(content=("hf/*",))
def train_phase(*, recipe: Trained, packed: Artifact, shards: Artifact, start: None, output: Output) -> Trained:
    """Trains nothing."""
    output.path("hf/config.json").write_text("{}")
    return recipe


def fill_store(store: Store, pages: Pages) -> None:
    """Commit the artifacts of one path from the source to a checkpoint."""
    documents = commit(store, ingest_documents, pages)
    for each in (extract_documents, deduplicate_documents, filter_documents, split_documents):
        documents = commit(store, each, pages, documents=documents)
    shards = commit(store, shard_documents, pages, documents=documents)
    packed = commit(store, pack_phase, shards=shards)
    commit(store, train_phase, recipe=Trained(), packed=packed, shards=shards, start=None)
