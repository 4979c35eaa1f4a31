"""Adds SCORE_COLUMNS to batches of documents. Runs in executors: imports no Spark."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.data.documents import SCORE_COLUMNS, arrow_schema
from tasks.data.language_id import NO_LANGUAGE, has_language, identify_languages
from tasks.data.ngram_model import load_model, scoring_fold
from tasks.data.text_classifiers import TextClassifier, classifier_scores

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class LanguageModelFiles:
    """The language models by language: one of reference text, or one per half of the documents; of each the file and the log probability of
    an unknown word."""

    order: int
    by_language: dict[str, tuple[tuple[str, float], ...]]


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
        ids, domains, sources, texts = (batch.column(name).to_pylist() for name in ("id", "domain", "source", "text"))
        prose = [place for place in range(len(ids)) if has_language(domains[place], sources[place])]
        columns: dict[str, list] = {name: [None] * len(ids) for name in schema.names}
        columns["language"] = [NO_LANGUAGE] * len(ids)
        found = _scores([ids[place] for place in prose], [texts[place] for place in prose], scorers)
        for name, values in found.items():
            for place, value in zip(prose, values, strict=True):
                columns[name][place] = value
        added = [pa.array(columns[field.name], field.type) for field in schema]
        yield pa.RecordBatch.from_arrays([*batch.columns, *added], names=[*batch.schema.names, *schema.names])


def _scores(ids: list[str], texts: list[str], scorers: Scorers) -> dict[str, list]:
    languages, shares = identify_languages(texts, scorers.max_language_chars, scorers.language_model_path)
    return {
        "language": languages,
        "language_score": shares,
        "perplexity": _perplexities(ids, texts, languages, scorers.ngram_models),
        **classifier_scores(scorers.classifiers, texts),
    }


def _perplexities(ids: list[str], texts: list[str], languages: list[str], files: LanguageModelFiles) -> list[float | None]:
    groups: dict[tuple[str, int], list[int]] = {}
    for place, language in enumerate(languages):
        if language in files.by_language:
            groups.setdefault((language, scoring_fold(ids[place], len(files.by_language[language]))), []).append(place)
    result: list[float | None] = [None] * len(ids)
    for (language, fold), places in groups.items():
        path, log_unknown = files.by_language[language][fold]
        model = load_model(path, log_unknown, files.order)
        for place, value in zip(places, model.perplexities([texts[place] for place in places]).tolist(), strict=True):
            result[place] = None if math.isnan(value) else value
    return result
