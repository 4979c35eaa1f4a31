"""Trains and judges a classifier over words: equal records give equal weights, on one thread."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tasks.data.scoring.linear_model import train_linear_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from configs.schema import ClassifierRecipe
    from tasks.data.scoring.linear_model import LinearModel

    F64 = NDArray[np.float64]
    Mask = NDArray[np.bool_]

CALIBRATION_ROUNDS = 50
CALIBRATION_RIDGE = 1e-3
STEP_SIZES = tuple(0.5**halvings for halvings in range(30))
NUM_BINS = 10
ORDINARY = "ordinary text"
"""File name of text that was not labelled for this kind and counts as its opposite."""
NO_WORDS = -10.0
"""Log odds of a record without any word that the model knows."""


@dataclass(frozen=True)
class LabelledText:
    """One record: its shortened text, whether its label is positive for the kind, and its file."""

    text: str
    is_positive: bool
    file: str = ""

    @cached_property
    def fold_hash(self) -> int:
        """Hash of the text: equal texts are held out together."""
        return int(hashlib.sha256(self.text.encode()).hexdigest()[:8], 16)


@dataclass(frozen=True)
class Labels:
    """Labels, files and folds of records, as arrays."""

    is_positive: Mask
    files: NDArray[np.str_]
    folds: NDArray[np.int64]

    @classmethod
    def of(cls, records: Sequence[LabelledText], num_folds: int) -> Labels:
        return cls(
            np.array([record.is_positive for record in records]),
            np.array([record.file for record in records]),
            np.array([record.fold_hash % num_folds for record in records]),
        )

    def among(self, chosen: Mask) -> Labels:
        return Labels(self.is_positive[chosen], self.files[chosen], self.folds[chosen])

    def weights(self, power: float) -> F64:
        """Per record, 1 on average: each side of each file weighs its number of records to the power of `1 - power`.

        At 1 all sides have equal weight. At 0.5 twenty thousand tweets weigh more than a thousand comments, but not
        twenty times as much."""
        weights = np.ones(len(self.is_positive))
        for file in np.unique(self.files):
            for side in (False, True):
                among = (self.files == file) & (self.is_positive == side)
                weights[among] = max(float(among.sum()), 1.0) ** -power
        return weights * len(weights) / weights.sum()


Fit: TypeAlias = "Callable[[Mask], Callable[[Mask], F64]]"
"""Trains on the records of one mask; the result gives the log odds of the records of another."""


def words_fit(texts: Sequence[str], labels: Labels, recipe: ClassifierRecipe) -> Fit:
    """The training function of the classifier over words, for `held_out`."""

    def fit(trained: Mask) -> Callable[[Mask], F64]:
        model = train_on_words(texts, labels, trained, recipe)
        return lambda judged: np.nan_to_num(
            model.logits([texts[index] for index in np.flatnonzero(judged).tolist()], 0.0), nan=NO_WORDS
        )

    return fit


def train_on_words(texts: Sequence[str], labels: Labels, trained: Mask, recipe: ClassifierRecipe) -> LinearModel:
    """A model of the records of a mask. Ordinary text has the same total weight as the labelled records."""
    chosen = np.flatnonzero(trained).tolist()
    among = labels.among(trained)
    weights, is_ordinary = among.weights(0.5), among.files == ORDINARY
    if is_ordinary.any():
        weights[is_ordinary] *= weights[~is_ordinary].sum() / weights[is_ordinary].sum()
    return train_linear_model([texts[index] for index in chosen], among.is_positive, weights, recipe)


def held_out(fit: Fit, is_positive: Mask, groups: NDArray) -> F64:
    """The log odds of every record by a model trained on the other groups. Raises ValueError if the others of a group
    are all positive or all negative."""
    result = np.zeros(len(is_positive))
    for group in np.unique(groups).tolist():
        others = groups != group
        if len(np.unique(is_positive[others])) < 2:
            raise ValueError(
                f"without fold {group} all {others.sum()} records have the same label: add records of both labels"
            )
        result[~others] = fit(others)(~others)
    return result


def area_under_curve(scores: F64, is_positive: Mask) -> float:
    """Probability that a positive record scores above a negative one; ties count half (Mann and Whitney)."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    num_positive = int(is_positive.sum())
    num_negative = len(scores) - num_positive
    ranks = float(middle[inverse][is_positive].sum())
    return (ranks - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def fit_calibration(logits: F64, is_positive: Mask, weights: F64) -> tuple[float, float]:
    """(slope, intercept) over the log odds of held-out records (Platt 1999), with equal weight for both sides: 83 % of
    20 thousand labelled tweets are toxic, but hardly any of the crawl, so the records' share has no meaning."""
    sides = np.where(is_positive, weights[is_positive].sum(), weights[~is_positive].sum())
    weights = weights * len(weights) / 2 / sides
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
        # Newton's step overshoots where most records are certain: halve it until the loss does not rise.
        size = next((size for size in STEP_SIZES if loss(values + size * move) <= loss(values)), 0.0)
        values = values + size * move
    slope, intercept = (float(f"{value:.6g}") for value in values)
    assert math.isfinite(slope) and math.isfinite(intercept), values
    return slope, intercept


def log_odds(share: float) -> float:
    return math.log(share / (1 - share))


def calibration_table(scores: F64, is_positive: Mask) -> list[dict[str, float]]:
    """Per tenth of the scale the number of held-out records, and the share of positive ones."""
    bins = np.minimum((scores * NUM_BINS).astype(int), NUM_BINS - 1)
    numbers, positives = np.bincount(bins, minlength=NUM_BINS), np.bincount(bins, is_positive, minlength=NUM_BINS)
    return [
        {"from": number / NUM_BINS, "records": int(count), "positive_share": round(float(positive / count), 4)}
        for number, (count, positive) in enumerate(zip(numbers, positives, strict=True))
        if count
    ]
