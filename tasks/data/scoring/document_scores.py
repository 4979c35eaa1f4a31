"""Adds SCORE_COLUMNS to batches of documents. Runs in executors: imports no Spark."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from configs.files.stored_files import StoredFile, local_copy
from tasks.data.records.documents import SCORE_COLUMNS, arrow_schema
from tasks.data.scoring.language_id import NO_LANGUAGE, has_language, identify_languages
from tasks.data.scoring.ngram_model import load_model
from tasks.data.scoring.text_classifiers import TextClassifier, classifier_scores
from tasks.data.text.prose_text import Beginnings, are_mathematics, prose_of
from tasks.data.text.words import split_words

if TYPE_CHECKING:
    import pyarrow as pa


PROSE_CHARS_PER_CHAR = 10
"""Characters searched for prose per character that language detection reads."""


class LanguageModelFile(NamedTuple):
    file: StoredFile
    log_unknown: float
    """Log probability of an unknown word."""
    held_out: tuple[float, ...]
    """Perplexities of reference documents that the model has not seen, ascending."""


@dataclass(frozen=True)
class LanguageModelFiles:
    """The language models, by language."""

    order: int
    by_language: dict[str, LanguageModelFile]


@dataclass(frozen=True)
class Scorers:
    """The models that score documents."""

    max_language_chars: int
    language_model_path: str
    classifiers: tuple[TextClassifier, ...]
    ngram_models: LanguageModelFiles


def score_batches(batches: Iterator[pa.RecordBatch], scorers: Scorers) -> Iterator[pa.RecordBatch]:
    """The batches with their scores, which depend only on the document itself. Program code and commits have none."""
    import pyarrow as pa

    schema = arrow_schema(SCORE_COLUMNS)
    for batch in batches:
        domains, sources, texts = (batch.column(name).to_pylist() for name in ("domain", "source", "text"))
        prose = [row for row in range(len(texts)) if has_language(domains[row], sources[row])]
        columns: dict[str, list] = {name: [None] * len(texts) for name in schema.names}
        columns["language"] = [NO_LANGUAGE] * len(texts)
        scores = _scores([texts[row] for row in prose], scorers)
        for name, values in scores.items():
            for row, value in zip(prose, values, strict=True):
                columns[name][row] = value
        added = [pa.array(columns[field.name], field.type) for field in schema]
        yield pa.RecordBatch.from_arrays([*batch.columns, *added], names=[*batch.schema.names, *schema.names])


def _scores(texts: list[str], scorers: Scorers) -> dict[str, list]:
    beginnings = Beginnings(texts)
    proses = [prose.natural for prose in beginnings.proses(PROSE_CHARS_PER_CHAR * scorers.max_language_chars)]
    languages, shares = identify_languages(proses, scorers.max_language_chars, scorers.language_model_path)
    return {
        "language": languages,
        "language_score": shares,
        **_perplexities(texts, languages, scorers.ngram_models),
        **classifier_scores(scorers.classifiers, beginnings),
    }


def _perplexities(texts: list[str], languages: list[str], files: LanguageModelFiles) -> dict[str, list[float | None]]:
    """Perplexity of each text's prose, and the share of the held-out reference documents below it; none for
    mathematics."""
    columns: dict[str, list[float | None]] = {
        "perplexity": [None] * len(texts),
        "perplexity_percentile": [None] * len(texts),
    }
    for language in sorted(set(languages) & set(files.by_language)):
        file = files.by_language[language]
        rows = [row for row, own in enumerate(languages) if own == language]
        proses = [prose_of(texts[row]) for row in rows]
        values = load_model(local_copy(file.file), file.log_unknown, files.order).perplexities(
            [prose.natural for prose in proses]
        )
        num_words = split_words([prose.text for prose in proses]).counts
        values[are_mathematics([prose.num_formula_words for prose in proses], num_words)] = np.nan
        ranks = np.searchsorted(file.held_out, values) / len(file.held_out)
        for row, value, rank in zip(rows, values.tolist(), ranks.tolist(), strict=True):
            if not math.isnan(value):
                columns["perplexity"][row], columns["perplexity_percentile"][row] = value, rank
    return columns
