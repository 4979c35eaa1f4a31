"""Documents to the n-grams that language models are built from. Runs in executors: imports no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.documents import sampling_hash
from tasks.data.language_id import NO_LANGUAGE, has_language, identify_languages
from tasks.data.ngram_model import count_ngrams, fold_of

if TYPE_CHECKING:
    import pyarrow as pa

SAMPLE_COLUMNS = "id string, language string, num_bytes long, text string"
COUNT_COLUMNS = "language string, fold int, size int, hash long, context long, suffix long, num_occurrences long"
"""Hashes as signed integers of the same bits: Spark has no others."""


def sample_texts(batches: Iterator[pa.RecordBatch], keep_below: int, max_chars: int, model_path: str) -> Iterator[pa.RecordBatch]:
    """SAMPLE_COLUMNS of the documents that are natural text in some language and whose sampling hash is below `keep_below`."""
    import pyarrow as pa

    for batch in batches:
        ids, domains, sources = (batch.column(name).to_pylist() for name in ("id", "domain", "source"))
        places = [
            place for place, identity in enumerate(ids)
            if sampling_hash(identity) < keep_below and has_language(domains[place], sources[place])
        ]  # fmt: skip
        texts = batch.column("text").take(pa.array(places, pa.int64()))
        languages, _ = identify_languages(texts.to_pylist(), max_chars, model_path)
        sizes = [len(text.encode()) for text in texts.to_pylist()]
        found = pa.RecordBatch.from_arrays(
            [pa.array([ids[place] for place in places], pa.string()), pa.array(languages, pa.string()), pa.array(sizes, pa.int64()), texts],
            names=["id", "language", "num_bytes", "text"],
        )
        yield found.filter(pa.array([language != NO_LANGUAGE for language in languages], pa.bool_()))


def count_batches(batches: Iterator[pa.RecordBatch], order: int, keep_below: dict[str, int]) -> Iterator[pa.RecordBatch]:
    """COUNT_COLUMNS of documents in the languages of `keep_below` whose sampling hash is below the language's."""
    import pyarrow as pa

    for batch in batches:
        groups: dict[tuple[str, int], list[str]] = {}
        for identity, language, text in zip(*(batch.column(name).to_pylist() for name in ("id", "language", "text")), strict=True):
            if sampling_hash(identity) < keep_below.get(language, 0):
                groups.setdefault((language, fold_of(identity)), []).append(text)
        for (language, fold), texts in sorted(groups.items()):
            counts = count_ngrams(texts, order)
            num_rows = len(counts["hash"])
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([language] * num_rows, pa.string()),
                    pa.array(np.full(num_rows, fold, dtype=np.int32)),
                    pa.array(counts["size"].astype(np.int32)),
                    *(pa.array(counts[name].view(np.int64)) for name in ("hash", "context", "suffix")),
                    pa.array(counts["num_occurrences"]),
                ],
                names=[column.split(" ")[0] for column in COUNT_COLUMNS.split(", ")],
            )
