"""Counts the n-grams of reference text for language models. Runs in executors: imports no Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasks.data.records.documents import names_of, sampling_hash
from tasks.data.scoring.language_id import NO_LANGUAGE, has_language, identify_languages
from tasks.data.scoring.ngram_model import count_ngrams
from tasks.data.text.prose_text import prose_of

if TYPE_CHECKING:
    import pyarrow as pa

SAMPLE_COLUMNS = "id string, language string, num_bytes long, content_digest string, text string, reason string"
"""text: the document's prose; reason: why there is no text, else empty."""
COUNT_COLUMNS = "language string, size int, hash long, context long, suffix long, num_occurrences long"
"""Hashes are signed integers of the same bits: Spark has no unsigned ones."""
HELD_OUT_VALUES = 1 << 16


@dataclass(frozen=True)
class Sampling:
    """The parameters by which texts are sampled and their language is detected."""

    keep_below: int
    """Texts with a smaller sampling hash are taken."""
    max_chars: int
    """Characters of a text that language detection reads."""
    model_path: str


class Training(NamedTuple):
    """The texts from which the model of a language learns."""

    num_bytes: int
    """Bytes of the sample."""
    trained_share: float
    keep_below: int
    held_below: int
    """Documents with a smaller held_out_hash are held out."""


def held_out_hash(identity: str) -> int:
    """16 uniform bits of a document's id, the lowest of its sampling hash: nearly independent of sampling."""
    return int(identity[12:], 16)


def sample_texts(batches: Iterator[pa.RecordBatch], sampling: Sampling) -> Iterator[pa.RecordBatch]:
    """SAMPLE_COLUMNS of the texts that are sampled and natural text in some language."""
    import pyarrow as pa

    for batch in batches:
        ids, domains, sources = (batch.column(name).to_pylist() for name in ("id", "domain", "source"))
        rows = [
            row
            for row, identity in enumerate(ids)
            if sampling_hash(identity) < sampling.keep_below and has_language(domains[row], sources[row])
        ]
        chosen = pa.array(rows, pa.int64())
        texts = [prose_of(text).natural for text in batch.column("text").take(chosen).to_pylist()]
        languages, _ = identify_languages(texts, sampling.max_chars, sampling.model_path)
        sizes = [len(text.encode()) for text in texts]
        samples = pa.RecordBatch.from_arrays(
            [
                pa.array([ids[row] for row in rows], pa.string()),
                pa.array(languages, pa.string()),
                pa.array(sizes, pa.int64()),
                batch.column("content_digest").take(chosen),
                pa.array(texts, pa.string()),
                pa.array([""] * len(rows), pa.string()),
            ],
            names=names_of(SAMPLE_COLUMNS),
        )
        yield samples.filter(pa.array([language != NO_LANGUAGE for language in languages], pa.bool_()))


def count_batches(
    batches: Iterator[pa.RecordBatch], order: int, trainings: Mapping[str, Training]
) -> Iterator[pa.RecordBatch]:
    """COUNT_COLUMNS of the texts that their language's model learns from."""
    import pyarrow as pa

    for batch in batches:
        groups: dict[str, list[str]] = {}
        columns = (batch.column(name).to_pylist() for name in ("id", "language", "text"))
        for identity, language, text in zip(*columns, strict=True):
            training = trainings.get(language)
            if training is None or held_out_hash(identity) < training.held_below:
                continue
            if sampling_hash(identity) < training.keep_below:
                groups.setdefault(language, []).append(text)
        for language, texts in sorted(groups.items()):
            counts = count_ngrams(texts, order)
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([language] * len(counts["hash"]), pa.string()),
                    pa.array(counts["size"].astype(np.int32)),
                    *(pa.array(counts[name].view(np.int64)) for name in ("hash", "context", "suffix")),
                    pa.array(counts["num_occurrences"]),
                ],
                names=names_of(COUNT_COLUMNS),
            )
