"""Tokenizes the documents of one Spark partition into one Megatron shard. Runs in executors: imports neither Spark nor
infra."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.records.documents import names_of
from tasks.data.shards.token_shard import token_dtype, write_index
from tasks.data.text.text_encoder import TextEncoder

if TYPE_CHECKING:
    import pyarrow as pa

SHARD_COLUMNS = (
    "shard string, sequence long, id string, source string, offset long, piece long, quality_bucket int, num_tokens "
    "long, "
    "num_trained_tokens long"
)
"""One row per sequence: its document's id, source and quality bucket, and its numbers of tokens."""

Sequences = tuple[np.ndarray, np.ndarray, "np.ndarray | None"]
"""Token ids of all sequences one after the other, the length of each, and whether each token is trained: None where
every one is."""


def write_shard(
    batches: Iterator[pa.RecordBatch], directory: str, tokenizer_path: str, end_of_text_id: int, vocab_size: int
) -> Iterator[pa.RecordBatch]:
    """Write the documents of a partition, sorted by id and all of one shard, as <shard>.bin and .idx; yields
    SHARD_COLUMNS."""
    encoder = TextEncoder(tokenizer_path)

    def encode_texts(batch: pa.RecordBatch) -> Sequences:
        return *encoder.encode(batch["text"], end_of_text_id), None

    return write_sequences(batches, Path(directory), token_dtype(vocab_size), encode_texts)


def write_sequences(
    batches: Iterator[pa.RecordBatch],
    directory: Path,
    dtype: np.dtype,
    encode_batch: Callable[[pa.RecordBatch], Sequences],
) -> Iterator[pa.RecordBatch]:
    """Write the sequences that `encode_batch` returns for each batch as one shard; a task that runs twice replaces the
    files as a whole."""
    import pyarrow as pa

    temporary = directory / f".{uuid.uuid4().hex}"
    mask_path = temporary.with_suffix(".mask")
    shard, lengths, num_sequences, is_masked = "", [], 0, False
    with open(temporary, "wb") as file, open(mask_path, "wb") as mask_file:
        for batch in batches:
            if not batch.num_rows:
                continue
            shard = batch["shard"][0].as_py()
            ids, counts, mask = encode_batch(batch)
            file.write(ids.astype(dtype).tobytes())
            lengths.append(counts)
            num_trained = counts
            if mask is not None:
                is_masked = True
                mask_file.write(mask.tobytes())
                num_trained = np.diff(np.concatenate([[0], np.cumsum(mask)])[np.concatenate([[0], np.cumsum(counts)])])
            numbers = np.arange(num_sequences, num_sequences + batch.num_rows)
            num_sequences += batch.num_rows
            kept = [batch[name] for name in ("id", "source", "offset", "piece", "quality_bucket")]
            columns = [batch["shard"], pa.array(numbers), *kept, pa.array(counts), pa.array(num_trained)]
            yield pa.RecordBatch.from_arrays(columns, names=names_of(SHARD_COLUMNS))
    if shard:
        _rename_finished(temporary, directory / shard, np.concatenate(lengths), dtype)
    if is_masked:
        os.replace(mask_path, directory / f"{shard}.mask")
    temporary.unlink(missing_ok=True)
    mask_path.unlink(missing_ok=True)


def _rename_finished(temporary: Path, shard_path: Path, lengths: np.ndarray, dtype: np.dtype) -> None:
    index = temporary.with_suffix(".idx")
    write_index(index, lengths, dtype)
    os.replace(temporary, f"{shard_path}.bin")
    os.replace(index, f"{shard_path}.idx")
