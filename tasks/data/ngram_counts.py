"""Documents and reference text to the n-grams that language models are built from. Runs in executors: imports no Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasks.data.documents import sampling_hash
from tasks.data.language_id import NO_LANGUAGE, has_language, identify_languages
from tasks.data.ngram_model import NUM_HALVES, count_ngrams, fold_of

if TYPE_CHECKING:
    import pyarrow as pa

SAMPLE_COLUMNS = "id string, language string, num_bytes long, content_digest string, text string, reason string"
"""reason: empty for a text."""
COUNT_COLUMNS = "language string, fold int, size int, hash long, context long, suffix long, num_occurrences long"
"""Hashes as signed integers of the same bits: Spark has no others."""
DOCUMENTS, REFERENCE = "documents", "reference"
"""Where text comes from."""


@dataclass(frozen=True)
class Sampling:
    """Which texts are taken."""

    keep_below: int
    """Those whose sampling hash is smaller."""
    max_chars: int
    """Of a text, that its language is found from."""
    model_path: str


class Training(NamedTuple):
    """What the models of a language learn from."""

    origin: str
    """Reference text makes one model for all documents; documents make one of each half, for the other half."""
    num_bytes: int
    """Of the sample."""
    trained_share: float
    keep_below: int

    @property
    def num_models(self) -> int:
        return NUM_HALVES if self.origin == DOCUMENTS else 1


def sample_texts(batches: Iterator[pa.RecordBatch], sampling: Sampling) -> Iterator[pa.RecordBatch]:
    """SAMPLE_COLUMNS of the documents that are sampled and natural text in some language."""
    import pyarrow as pa

    for batch in batches:
        ids, domains, sources = (batch.column(name).to_pylist() for name in ("id", "domain", "source"))
        places = [
            place for place, identity in enumerate(ids)
            if sampling_hash(identity) < sampling.keep_below and has_language(domains[place], sources[place])
        ]  # fmt: skip
        chosen = pa.array(places, pa.int64())
        texts, digests = batch.column("text").take(chosen), batch.column("content_digest").take(chosen)
        languages, _ = identify_languages(texts.to_pylist(), sampling.max_chars, sampling.model_path)
        sizes = [len(text.encode()) for text in texts.to_pylist()]
        found = pa.RecordBatch.from_arrays(
            [
                pa.array([ids[place] for place in places], pa.string()), pa.array(languages, pa.string()), pa.array(sizes, pa.int64()),
                digests, texts, pa.array([""] * len(places), pa.string()),
            ],
            names=[column.split(" ")[0] for column in SAMPLE_COLUMNS.split(", ")],
        )  # fmt: skip
        yield found.filter(pa.array([language != NO_LANGUAGE for language in languages], pa.bool_()))


def count_batches(batches: Iterator[pa.RecordBatch], order: int, trainings: Mapping[str, Training]) -> Iterator[pa.RecordBatch]:
    """COUNT_COLUMNS of texts of the origin that their language's models learn from, sampled as it says."""
    import pyarrow as pa

    for batch in batches:
        groups: dict[tuple[str, int], list[str]] = {}
        columns = (batch.column(name).to_pylist() for name in ("id", "language", "origin", "text"))
        for identity, language, origin, text in zip(*columns, strict=True):
            training = trainings.get(language)
            if training is not None and origin == training.origin and sampling_hash(identity) < training.keep_below:
                groups.setdefault((language, fold_of(identity, training.num_models)), []).append(text)
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
