"""How often every pre-token occurs: counted per partition, summed by Spark, read as one table. Runs in executors: imports no Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.pretokens import cut_pretokens

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

WORD_COLUMNS = "word string, num_words long"
MAX_WORDS = 2**20
"""Distinct words that a partition keeps before it hands its counts on: what bounds its memory, whatever the text's size."""

LEARNER_BYTES_PER_BYTE, LEARNER_BYTES_PER_WORD = 30, 100
"""Memory of learning from a table of distinct words: 110 MiB for 400,000 words of 8 random letters and 16,000 tokens, rounded up."""


@dataclass(frozen=True)
class WordTable:
    """Distinct words, one after the other in `text`, and how often each occurs."""

    text: np.ndarray
    starts: np.ndarray
    """Where each word begins in the text, and where the last ends."""
    counts: np.ndarray

    @property
    def num_bytes(self) -> int:
        return int(self.starts[-1] - self.starts[0])


def count_words(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """WORD_COLUMNS of a partition of texts; a word may come more than once."""
    counts: list[pa.Table] = []
    for batch in batches:
        counts.append(_counts(batch["text"]))
        if sum(map(len, counts)) > MAX_WORDS:
            counts = [sum_counts(counts)]
        if len(counts) == 1 and len(counts[0]) > MAX_WORDS // 2:
            yield from counts.pop().to_batches(2**16)
    if counts:
        yield from sum_counts(counts).to_batches(2**16)


def count_texts(texts: Iterable[str]) -> WordTable:
    """The words of texts that are at hand."""
    import pyarrow as pa

    return word_table(_counts(pa.array(list(texts), pa.string())))


def sum_counts(tables: list[pa.Table]) -> pa.Table:
    """One row per word."""
    import pyarrow as pa

    summed = pa.concat_tables(tables).group_by("word").aggregate([("num_words", "sum")])
    return summed.rename_columns({"num_words_sum": "num_words"}).select(["word", "num_words"])


def word_table(table: pa.Table) -> WordTable:
    """The words of a table in which each has one row."""
    import pyarrow as pa

    words = table["word"].cast(pa.large_string()).combine_chunks()
    words = pa.concat_arrays(words.chunks) if isinstance(words, pa.ChunkedArray) else words
    starts = np.zeros(1, np.int64)
    if len(words):
        starts = np.frombuffer(words.buffers()[1], np.int64)[words.offset : words.offset + len(words) + 1]
    return WordTable(np.frombuffer(words.buffers()[2] or b"", np.uint8), starts, table["num_words"].to_numpy())


def _counts(texts: pa.Array) -> pa.Table:
    import pyarrow as pa

    tables = []
    for chunk in cut_pretokens(texts):
        counted = chunk.words.value_counts()
        tables.append(pa.table({"word": counted.field(0), "num_words": counted.field(1)}))
    empty = pa.table({"word": pa.array([], pa.string()), "num_words": pa.array([], pa.int64())})
    return sum_counts([empty, *tables])


def read_words(directory: Path) -> WordTable:
    """The table that Spark wrote, each word in one row. Raises ValueError where learning from it would take more memory than is free."""
    import psutil
    import pyarrow.dataset as dataset
    import pyarrow.parquet as pq

    files = sorted(directory.glob("*.parquet"))
    metadata = [pq.ParquetFile(file).metadata for file in files]
    num_words = sum(one.num_rows for one in metadata)
    num_bytes = sum(one.row_group(number).column(0).total_uncompressed_size for one in metadata for number in range(one.num_row_groups))
    needed, free = LEARNER_BYTES_PER_BYTE * num_bytes + LEARNER_BYTES_PER_WORD * num_words, psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"{num_words:,} distinct words with {num_bytes:,} bytes need about {needed / 2**30:.1f} GiB to learn merges from, "
            f"{free / 2**30:.1f} GiB are free: raise tokenizer.min_word_count, lower tokenizer.sample_chars, or give the driver more memory"
        )
    return word_table(dataset.dataset([str(file) for file in files]).to_table(columns=["word", "num_words"]))
