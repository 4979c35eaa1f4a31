"""Trains the toxicity classifier: a model over words, and for texts in doubt weights over an encoder's vectors.

The model over words clears most passages. It learns from all labelled records. It also learns from the records of other
kinds, as text that is not toxic: toxicity was labelled in posts and comments, which documents are not. The encoder's
weights learn from at most MAX_RECORDS of each side of each file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.embedding.passage_encoder import encode_passages
from tasks.data.scoring.classifier_training import ORDINARY, LabelledText, Labels, held_out
from tasks.data.scoring.text_classifiers import passages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from configs.schema import ClassifierRecipe

    F64 = NDArray[np.float64]
    Mask = NDArray[np.bool_]

MAX_RECORDS = 1000
"""Largest number of records of each side of each file; with all 32,025 shared records the areas under the curve of
held-out files were no larger."""
MAX_ORDINARY_PASSAGES = 5000
DOUBT_RECALL = 0.95
"""Share of the held-out toxic records that the model over words leaves in doubt. With it the encoder reads 2 to 6 % of
the passages of web pages, articles, books and speeches, and 82 % of the toxic texts of a set of another kind; with 0.98
it is 6 to 20 % and 88 %."""
INVERSE_PENALTY = 3e-4
"""Inverse L2 penalty of the encoder's weights, over vectors scaled to variance 1."""


@dataclass(frozen=True)
class Reading:
    """The encoder's part: its vectors' weights (the intercept last), and its log odds of held-out records."""

    weights: F64
    labels: Labels
    logits: F64
    """Log odds of records held out by fold."""
    logits_by_file: F64 | None
    """Log odds of records held out by file: how well labels transfer to another kind of text. None for one file."""


def with_ordinary_text(records: Sequence[LabelledText], others: Sequence[LabelledText]) -> list[LabelledText]:
    """The records, and passages of other kinds' records as those that are not toxic, chosen by the hash of their
    text."""
    passages = {LabelledText(passage, False, ORDINARY) for other in others for passage in passages_of(other.text)}
    return [*records, *sorted(passages, key=lambda passage: (passage.fold_hash, passage.text))[:MAX_ORDINARY_PASSAGES]]


def doubt_from(logits: F64, labels: Labels) -> float:
    """The log odds by words above which DOUBT_RECALL of the toxic records are, with equal weight per file."""
    toxic = logits[labels.is_positive]
    order = np.argsort(toxic)
    weights = np.cumsum(labels.weights(1.0)[labels.is_positive][order])
    return float(toxic[order][np.searchsorted(weights, (1 - DOUBT_RECALL) * weights[-1])])


def read_records(records: Sequence[LabelledText], recipe: ClassifierRecipe) -> Reading:
    """Train the encoder's weights."""
    taken: dict[tuple[str, bool], int] = {}
    chosen = []
    for record in sorted(records, key=lambda record: (record.fold_hash, record.text)):
        key = (record.file, record.is_positive)
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= MAX_RECORDS:
            chosen.append(record)
    labels = Labels.of(chosen, recipe.num_folds)
    vectors = encode_passages([record.text for record in chosen], recipe.encoder)

    def fit(trained: Mask) -> Callable[[Mask], F64]:
        weights = _fit_vectors(vectors[trained], labels.among(trained))
        return lambda judged: vectors[judged] @ weights[:-1] + weights[-1]

    has_files = all(
        len(set(labels.is_positive[labels.files != file].tolist())) == 2 for file in set(labels.files.tolist())
    )
    return Reading(
        _fit_vectors(vectors, labels),
        labels,
        held_out(fit, labels.is_positive, labels.folds),
        held_out(fit, labels.is_positive, labels.files) if has_files else None,
    )


def _fit_vectors(vectors: F64, labels: Labels) -> F64:
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    mean, deviation = vectors.mean(axis=0), vectors.std(axis=0) + 1e-9
    with threadpool_limits(1):  # sums of several threads may differ
        fitted = LogisticRegression(C=INVERSE_PENALTY, max_iter=1000).fit(
            (vectors - mean) / deviation, labels.is_positive, sample_weight=labels.weights(0.5)
        )
    weights = fitted.coef_[0] / deviation
    return np.append(weights, fitted.intercept_[0] - mean @ weights)
