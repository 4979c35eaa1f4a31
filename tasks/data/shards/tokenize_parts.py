"""Tokenizes the documents of one Spark partition into one Megatron shard. Runs in executors: imports neither Spark nor
infra."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from configs.files.stored_files import StoredFile, local_copy, writing
from tasks.data.records.documents import arrow_schema, names_of
from tasks.data.shards.token_shard import index_bytes, token_dtype
from tasks.data.text.text_encoder import TextEncoder

if TYPE_CHECKING:
    import pyarrow as pa

SHARD_COLUMNS = (
    "shard string, sequence long, id string, source string, offset long, piece long, quality_bucket int, num_tokens "
    "long, "
    "num_trained_tokens long, file string"
)
"""One row per sequence: which document it is, where that came from, and how good it was judged to be. And one row per
file, whose `file` describes it and whose other columns but the shard are null."""
SIDECAR = ("sequence", "id", "source", "offset", "piece", "quality_bucket", "num_tokens", "num_trained_tokens")

Sequences = tuple[np.ndarray, np.ndarray, "np.ndarray | None"]
"""Token ids of all sequences one after the other, the length of each, and whether each token is trained: None where
every one is."""


def write_shard(
    batches: Iterator[pa.RecordBatch], directory: str, tokenizer: StoredFile, end_of_text_id: int, vocab_size: int
) -> Iterator[pa.RecordBatch]:
    """Write the documents of a partition, sorted by id and all of one shard, as <shard>.bin, .idx and sidecar; yields
    SHARD_COLUMNS."""
    encoder = TextEncoder(local_copy(tokenizer))

    def encode_texts(batch: pa.RecordBatch) -> Sequences:
        return *encoder.encode(batch["text"], end_of_text_id), None

    return write_sequences(batches, directory, token_dtype(vocab_size), encode_texts)


def write_sequences(
    batches: Iterator[pa.RecordBatch],
    directory: str,
    dtype: np.dtype,
    encode_batch: Callable[[pa.RecordBatch], Sequences],
) -> Iterator[pa.RecordBatch]:
    """Write what `encode_batch` makes of each batch as one shard below `directory`, an address; a task that runs twice
    replaces the files as a whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is None:
        return
    shard = first["shard"][0].as_py()
    sequences: list[pa.RecordBatch] = []
    with ExitStack() as stack:
        file, written = stack.enter_context(writing(f"{directory}/{shard}.bin"))
        mask_file, is_masked = None, False
        for batch in chain([first], rows):
            ids, counts, mask = encode_batch(batch)
            file.write(ids.astype(dtype).tobytes())
            if mask is not None and not is_masked:
                mask_file, masks = stack.enter_context(writing(f"{directory}/{shard}.mask"))
                is_masked = True
            if mask is not None and mask_file is not None:
                mask_file.write(mask.tobytes())
            sequences.append(_rows_of_sequences(batch, sum(len(own) for own in sequences), counts, mask))
            yield sequences[-1]
    sidecar = pa.Table.from_batches(sequences).select(SIDECAR).combine_chunks()
    lengths = sidecar["num_tokens"].to_numpy()
    with writing(f"{directory}/{shard}.idx") as (index, indices):
        index.write(index_bytes(lengths, dtype))
    with writing(f"{directory}/{shard}.parquet") as (table, tables):
        pq.write_table(sidecar, table, compression="zstd")
    made = [*written, *(masks if is_masked else ()), *indices, *tables]
    yield _rows_of_files(shard, made)


def _rows_of_sequences(
    batch: pa.RecordBatch, first: int, counts: np.ndarray, mask: np.ndarray | None
) -> pa.RecordBatch:
    """SHARD_COLUMNS of the sequences of a batch, which are counted from `first`."""
    import pyarrow as pa

    num_trained = counts
    if mask is not None:
        num_trained = np.diff(np.concatenate([[0], np.cumsum(mask)])[np.concatenate([[0], np.cumsum(counts)])])
    numbers = np.arange(first, first + batch.num_rows)
    kept = [batch[name] for name in ("id", "source", "offset", "piece", "quality_bucket")]
    no_file = pa.nulls(batch.num_rows, pa.string())
    columns = [batch["shard"], pa.array(numbers), *kept, pa.array(counts), pa.array(num_trained), no_file]
    return pa.RecordBatch.from_arrays(columns, names=names_of(SHARD_COLUMNS))


def _rows_of_files(shard: str, files: list[StoredFile]) -> pa.RecordBatch:
    import pyarrow as pa

    rows = [{"shard": shard, "file": json.dumps(asdict(file))} for file in files]
    return pa.RecordBatch.from_pylist(rows, schema=arrow_schema(SHARD_COLUMNS))


def read_file_rows(rows: Iterable[str]) -> list[StoredFile]:
    """The files that the `file` column describes."""
    described = map(json.loads, rows)
    return [StoredFile(one["uri"], one["size"], one["sha256"], tuple(one["blocks"])) for one in described]
