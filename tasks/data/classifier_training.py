"""Trains and judges one fastText classifier: the same bytes for the same records, on one thread.

fastText on one thread initialises a tenth of its input matrix and leaves the rest as the memory was (densematrix.cc, `uniform`): training
ends in NaN at random and gives another model each time. So every row is handed to it, as `pretrainedVectors`, and no feature is hashed
into buckets, which cannot be handed over: runs of words are features of the vocabulary like words.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.language_id import load_fasttext
from tasks.data.text_classifiers import NEGATIVE, POSITIVE, calibrated, features_of, logit, raw_probability, words_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from configs.schema import ClassifierRecipe

    F64 = NDArray[np.float64]

END_OF_TEXT = "</s>"
"""What fastText adds to every text."""
CALIBRATION_ROUNDS = 50
CALIBRATION_RIDGE = 1e-3
STEP_SIZES = tuple(0.5**halvings for halvings in range(30))
NUM_BINS = 10


@dataclass(frozen=True)
class LabelledText:
    """One record: its text, cut, and whether its label counts as the kind itself."""

    text: str
    is_positive: bool

    @property
    def fold_hash(self) -> int:
        """By text: equal ones are held out together."""
        return int(hashlib.sha256(self.text.encode()).hexdigest()[:8], 16)


def train_model(features: Sequence[list[str]], is_positive: Sequence[bool], epochs: int, recipe: ClassifierRecipe, path: Path) -> None:
    """Write a fastText model of texts given as features."""
    import fasttext

    counts = Counter(feature for text in features for feature in text)
    vocabulary = [END_OF_TEXT, *sorted(feature for feature, count in counts.items() if count >= recipe.min_word_count)]
    known = frozenset(vocabulary)
    generator = np.random.Generator(np.random.Philox(recipe.seed))
    bound = 1.0 / recipe.dimensions
    vectors = generator.uniform(-bound, bound, (len(vocabulary), recipe.dimensions))
    with tempfile.TemporaryDirectory() as directory:
        start, records = Path(directory) / "start.vec", Path(directory) / "records.txt"
        rows = (f"{word} {' '.join(f'{value:.6g}' for value in row)}\n" for word, row in zip(vocabulary, vectors.tolist(), strict=True))
        start.write_text(f"{len(vocabulary)} {recipe.dimensions}\n{''.join(rows)}", encoding="utf-8")
        lines = (
            f"{POSITIVE if positive else NEGATIVE} {' '.join(feature for feature in text if feature in known)}\n"
            for text, positive in zip(features, is_positive, strict=True)
        )
        records.write_text("".join(lines), encoding="utf-8")
        model = fasttext.train_supervised(
            str(records), pretrainedVectors=str(start), dim=recipe.dimensions, epoch=epochs, lr=recipe.learning_rate, minCount=1,
            wordNgrams=1, minn=0, maxn=0, bucket=0, thread=1, verbose=0, seed=recipe.seed,
        )  # fmt: skip
    model.save_model(str(path))


def held_out_probabilities(records: Sequence[LabelledText], epochs: int, recipe: ClassifierRecipe) -> F64:
    """fastText's probability of each record, from a model trained on the other folds. Raises ValueError if a fold leaves one class only."""
    features = [features_of(words_of(record.text), recipe.word_ngrams) for record in records]
    labels = np.array([record.is_positive for record in records])
    folds = np.array([record.fold_hash % recipe.num_folds for record in records])
    result = np.zeros(len(records))
    with tempfile.TemporaryDirectory() as directory:
        for fold in range(recipe.num_folds):
            others, mine = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
            if len(set(labels[others].tolist())) < 2:
                raise ValueError(
                    f"without fold {fold} of {recipe.num_folds} all {len(others)} records have the same side: label more, or evenly"
                )
            path = Path(directory) / f"fold-{fold}.bin"
            train_model([features[place] for place in others], labels[others].tolist(), epochs, recipe, path)
            result[mine] = [raw_probability(str(path), features[place]) for place in mine]
            load_fasttext.cache_clear()
    return result


def area_under_curve(scores: F64, is_positive: NDArray[np.bool_]) -> float:
    """Probability that a positive record scores above a negative one; ties count half (Mann and Whitney)."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    num_positive = int(is_positive.sum())
    num_negative = len(scores) - num_positive
    ranks = float(middle[inverse][is_positive].sum())
    return (ranks - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def fit_calibration(probabilities: F64, is_positive: NDArray[np.bool_]) -> tuple[float, float]:
    """(slope, intercept) over the logit (Platt 1999), both classes of equal weight: of 20 thousand labelled tweets 83 % are toxic, of the
    crawl hardly any, so the records' share says nothing."""
    logits = np.array([logit(value) for value in probabilities.tolist()])
    share = float(is_positive.sum()) / len(is_positive)
    weights = np.where(is_positive, 0.5 / share, 0.5 / (1 - share))
    inputs = np.stack([logits, np.ones_like(logits)], axis=1)
    values = np.array([1.0, 0.0])

    def loss(candidate: F64) -> float:
        signed = np.where(is_positive, 1.0, -1.0) * (inputs @ candidate)
        return float((weights * np.logaddexp(0.0, -signed)).sum() + CALIBRATION_RIDGE / 2 * candidate @ candidate)

    for _ in range(CALIBRATION_ROUNDS):
        expected = 1 / (1 + np.exp(-np.clip(inputs @ values, -30, 30)))
        gradient = inputs.T @ (weights * (is_positive - expected)) - CALIBRATION_RIDGE * values
        curvature = (inputs * (weights * expected * (1 - expected))[:, None]).T @ inputs + CALIBRATION_RIDGE * np.eye(2)
        move = np.linalg.solve(curvature, gradient)
        # Newton's step overshoots where most records are certain: half of it, and again, until the loss does not rise.
        size = next((size for size in STEP_SIZES if loss(values + size * move) <= loss(values)), 0.0)
        values = values + size * move
    slope, intercept = (float(f"{value:.6g}") for value in values)
    assert math.isfinite(slope) and math.isfinite(intercept), values
    return slope, intercept


def calibration_table(scores: F64, is_positive: NDArray[np.bool_]) -> list[dict[str, float]]:
    """Per tenth of the scale: held-out records in it, and which share of them is positive."""
    place = np.minimum((scores * NUM_BINS).astype(int), NUM_BINS - 1)
    numbers, positives = np.bincount(place, minlength=NUM_BINS), np.bincount(place, is_positive, minlength=NUM_BINS)
    return [
        {"from": number / NUM_BINS, "records": int(count), "positive_share": round(float(positive / count), 4)}
        for number, (count, positive) in enumerate(zip(numbers, positives, strict=True))
        if count
    ]


def calibrated_all(probabilities: F64, slope: float, intercept: float) -> F64:
    """`calibrated` of many."""
    return np.array([calibrated(value, slope, intercept) for value in probabilities.tolist()])
