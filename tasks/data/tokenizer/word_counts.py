"""Counts every pre-token: per partition, summed by Spark, read as one table. Runs in executors: imports no Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.records.parcels import packed
from tasks.data.text.pretokens import cut_pretokens
from tasks.data.tokenizer.bpe_merges import WordTable

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

WORD_COLUMNS = "word string, num_words long"
MAX_WORDS = 2**19
"""Words that a partition keeps before it yields its counts: this bounds its memory to about 100 MiB for any size of
text."""
BATCH_WORDS = 2**16
"""Words that are read at once."""


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


def pack_words(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """(words) of one row per batch of WORD_COLUMNS: to the driver it goes as one value."""
    import pyarrow as pa

    for batch in batches:
        yield pa.RecordBatch.from_arrays([pa.array([packed(pa.Table.from_batches([batch]))])], names=["words"])


def write_words(parcels: Iterable[bytes], directory: Path) -> None:
    """Write packed words as a file of `directory`, one parcel in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("word", pa.string()), ("num_words", pa.int64())])
    with pq.ParquetWriter(directory / "words.parquet", schema) as writer:
        for parcel in parcels:
            writer.write_table(pa.ipc.open_stream(parcel).read_all().cast(schema))


def count_texts(texts: Iterable[str]) -> WordTable:
    """The counted words of texts in memory."""
    import pyarrow as pa

    return word_table(_counts(pa.array(list(texts), pa.string())))


def sum_counts(tables: list[pa.Table]) -> pa.Table:
    """Sum the counts of tables: one row per word."""
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


def num_rows(directory: Path) -> int:
    """Words that were written."""
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(file).num_rows for file in directory.glob("*.parquet"))


def read_words(directory: Path) -> Iterator[WordTable]:
    """What write_words wrote, each word in one row of one batch."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in sorted(directory.glob("*.parquet")):
        # Read in parts: a row group is 128 MiB.
        with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
            for batch in file.iter_batches(BATCH_WORDS, columns=["word", "num_words"], use_threads=False):
                yield word_table(pa.Table.from_batches([batch]))
