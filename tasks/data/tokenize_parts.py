"""Tokenizes the documents of one Spark partition into one Megatron shard. Runs inside executors: imports neither Spark nor infra."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.token_shard import append_tokens, token_dtype, write_index

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

SHARD_COLUMNS = "shard string, sequence long, id string, source string, offset long, piece long, num_tokens long"
"""One row per sequence: which document it is, and where that came from."""


def write_shard(
    batches: Iterator[pa.RecordBatch], directory: str, tokenizer_path: str, end_of_text_id: int, vocab_size: int
) -> Iterator[pa.RecordBatch]:
    """Write the documents of a partition, sorted by id and all of one shard, as <shard>.bin and .idx; yields SHARD_COLUMNS.

    A task that runs twice replaces the files as a whole.
    """
    from pathlib import Path

    import pyarrow as pa
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Spark runs one worker per core
    tokenizer = Tokenizer.from_file(tokenizer_path)
    tokenizer.encode_special_tokens = True  # a document that speaks of <|endoftext|> holds its characters, never its id
    dtype = token_dtype(vocab_size)
    temporary = Path(directory) / f".{uuid.uuid4().hex}"
    shard, lengths, num_sequences = "", [], 0
    with open(temporary, "wb") as file:
        for batch in batches:
            if not batch.num_rows:
                continue
            shard = batch["shard"][0].as_py()
            encoded = tokenizer.encode_batch_fast(batch["text"].to_pylist(), add_special_tokens=False)
            counts = append_tokens(file, [[*item.ids, end_of_text_id] for item in encoded], dtype)
            lengths.append(counts)
            numbers = np.arange(num_sequences, num_sequences + batch.num_rows)
            num_sequences += batch.num_rows
            kept = [batch[name] for name in ("id", "source", "offset", "piece")]
            columns = [batch["shard"], pa.array(numbers), *kept, pa.array(counts)]
            yield pa.RecordBatch.from_arrays(columns, names=[column.split(" ")[0] for column in SHARD_COLUMNS.split(", ")])
    if not shard:
        os.unlink(temporary)
        return
    _place(temporary, Path(directory), shard, np.concatenate(lengths), dtype)


def _place(temporary: Path, directory: Path, shard: str, lengths: np.ndarray, dtype: np.dtype) -> None:
    index = temporary.with_suffix(".idx")
    write_index(index, lengths, dtype)
    os.replace(temporary, directory / f"{shard}.bin")
    os.replace(index, directory / f"{shard}.idx")
