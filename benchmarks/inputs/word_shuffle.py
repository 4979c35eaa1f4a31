"""Words counted in batches and summed by parts on disk: what Spark's executors and shuffle do in train_tokenizer, in
one process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.data.tokenizer.word_counts import count_words, sum_counts

NUM_PARTS = 64
NUM_WEIGHTS = 64
COUNTED = pa.schema([("word", pa.string()), ("num_words", pa.int64())])


def count_into(directory: Path, batches: Iterator[pa.RecordBatch]) -> None:
    """The words of batches with a column `text` into Parquet files, each word in one row of one of them."""
    parts = directory / "parts"
    parts.mkdir(parents=True)
    paths = [parts / f"{number}.arrow" for number in range(NUM_PARTS)]
    streams = [pa.ipc.new_stream(pa.OSFile(str(path), "wb"), COUNTED) for path in paths]
    for counted in count_words(batches):
        part = _part_of(counted["word"])
        order = np.argsort(part, kind="stable")
        sorted_rows = counted.take(pa.array(order))
        bounds = np.searchsorted(part[order], np.arange(NUM_PARTS + 1))
        for number, stream in enumerate(streams):
            stream.write_batch(sorted_rows.slice(bounds[number], bounds[number + 1] - bounds[number]).cast(COUNTED))
    for stream in streams:
        stream.close()
    for number, path in enumerate(paths):
        with pa.ipc.open_stream(pa.OSFile(str(path))) as stream:
            summed = sum_counts([stream.read_all()])
        pq.write_table(summed, directory / f"part-{number:05}.parquet")
    shutil.rmtree(parts)


def _part_of(words: pa.StringArray) -> np.ndarray:
    """The same part for the same word: a sum of its bytes, weighted by their offset."""
    offsets = np.frombuffer(words.buffers()[1], np.int32)[words.offset : words.offset + len(words) + 1].astype(np.int64)
    text = np.frombuffer(words.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    weights = np.random.Generator(np.random.Philox(1)).integers(1, 2**62, NUM_WEIGHTS, dtype=np.uint64)
    offset = np.arange(len(text)) - np.repeat(offsets[:-1] - offsets[0], np.diff(offsets))
    sums = np.add.reduceat((text + np.uint64(1)) * weights[offset % NUM_WEIGHTS], offsets[:-1] - offsets[0])
    return (sums >> np.uint64(32)) % np.uint64(NUM_PARTS)
