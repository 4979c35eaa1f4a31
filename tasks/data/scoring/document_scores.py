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
from tasks.data.text.prose_text import are_mathematics, prose_of
from tasks.data.text.words import split_words

if TYPE_CHECKING:
    import pyarrow as pa


PROSE_CHARS_PER_CHAR = 10
"""Times the characters that a language is found from: so much of a text is looked through for its prose."""


class LanguageModelFile(NamedTuple):
    file: StoredFile
    log_unknown: float
    """Log probability of an unknown word."""
    held_out: tuple[float, ...]
    """Perplexities of reference documents that the model has not seen, in their order."""


@dataclass(frozen=True)
class LanguageModelFiles:
    """The language models, by language."""

    order: int
    by_language: dict[str, LanguageModelFile]


@dataclass(frozen=True)
class Scorers:
    """All that documents are scored with."""

    max_language_chars: int
    language_model_path: str
    classifiers: tuple[TextClassifier, ...]
    ngram_models: LanguageModelFiles


def score_batches(batches: Iterator[pa.RecordBatch], scorers: Scorers) -> Iterator[pa.RecordBatch]:
    """The batches with their scores; each document's depend on it alone. Program code and changes have none."""
    import pyarrow as pa

    schema = arrow_schema(SCORE_COLUMNS)
    for batch in batches:
        domains, sources, texts = (batch.column(name).to_pylist() for name in ("domain", "source", "text"))
        prose = [place for place in range(len(texts)) if has_language(domains[place], sources[place])]
        columns: dict[str, list] = {name: [None] * len(texts) for name in schema.names}
        columns["language"] = [NO_LANGUAGE] * len(texts)
        found = _scores([texts[place] for place in prose], scorers)
        for name, values in found.items():
            for place, value in zip(prose, values, strict=True):
                columns[name][place] = value
        added = [pa.array(columns[field.name], field.type) for field in schema]
        yield pa.RecordBatch.from_arrays([*batch.columns, *added], names=[*batch.schema.names, *schema.names])


def _scores(texts: list[str], scorers: Scorers) -> dict[str, list]:
    beginnings = [prose_of(text[: PROSE_CHARS_PER_CHAR * scorers.max_language_chars]).natural for text in texts]
    languages, shares = identify_languages(beginnings, scorers.max_language_chars, scorers.language_model_path)
    return {
        "language": languages,
        "language_score": shares,
        **_perplexities(texts, languages, scorers.ngram_models),
        **classifier_scores(scorers.classifiers, texts),
    }


def _perplexities(texts: list[str], languages: list[str], files: LanguageModelFiles) -> dict[str, list[float | None]]:
    """Of the prose of each text, and the share of the held-out reference documents below it; mathematics has none."""
    found: dict[str, list[float | None]] = {
        "perplexity": [None] * len(texts),
        "perplexity_percentile": [None] * len(texts),
    }
    for language in sorted(set(languages) & set(files.by_language)):
        file = files.by_language[language]
        places = [place for place, own in enumerate(languages) if own == language]
        proses = [prose_of(texts[place]) for place in places]
        values = load_model(local_copy(file.file), file.log_unknown, files.order).perplexities(
            [prose.natural for prose in proses]
        )
        num_words = split_words([prose.text for prose in proses]).counts
        values[are_mathematics([prose.num_formula_words for prose in proses], num_words)] = np.nan
        ranks = np.searchsorted(file.held_out, values) / len(file.held_out)
        for place, value, rank in zip(places, values.tolist(), ranks.tolist(), strict=True):
            if not math.isnan(value):
                found["perplexity"][place], found["perplexity_percentile"][place] = value, rank
    return found
