"""A linear model over words, signs and pairs of them (TF-IDF), its training and its file.

Features are hashed to a table of weights. The weight of a feature in a text is (1 + log of its count) times its
inverse document frequency. The features of a text have length 1 together (TfidfVectorizer's `sublinear_tf`). Runs in
executors: imports no Spark.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.text.words import ngram_hashes, split_words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from configs.schema import ClassifierRecipe

    F64 = NDArray[np.float64]
    I64 = NDArray[np.int64]

TABLE_BITS = 20
"""2^20 buckets of features: of the 300,000 pairs of words in the shared labelled texts one in seven shares its bucket
with another."""
TEXTS_AT_ONCE = 256


@dataclass(frozen=True)
class Features:
    """The features of a batch of texts: one entry per text and feature."""

    texts: I64
    buckets: I64
    counts: I64
    num_texts: int

    def weights(self, idf: F64) -> F64:
        """Weight of each entry; the entries of a text form a vector of length 1."""
        weights = (1.0 + np.log(self.counts)) * idf[self.buckets]
        lengths = np.sqrt(np.bincount(self.texts, weights**2, self.num_texts))
        return weights / np.where(lengths > 0, lengths, 1.0)[self.texts]


def features_of(texts: Sequence[str], word_ngrams: int) -> tuple[Features, Features]:
    """(all features, single words with a letter in them)."""
    words = split_words(texts, with_signs=True)
    owners = np.repeat(np.arange(len(texts)), words.counts)
    single = _counted(owners[words.has_letter], words.hashes[words.has_letter], len(texts))
    runs = [(words.hashes, owners), *(ngram_hashes(words, size) for size in range(2, word_ngrams + 1))]
    hashes, numbers = (np.concatenate(parts) for parts in zip(*runs, strict=True))
    return _counted(numbers, hashes, len(texts)), single


def _counted(texts: I64, hashes: NDArray[np.uint64], num_texts: int) -> Features:
    keys = (texts.astype(np.uint64) << np.uint64(TABLE_BITS)) | (hashes >> np.uint64(64 - TABLE_BITS))
    unique, counts = np.unique(keys, return_counts=True)
    return Features(
        (unique >> np.uint64(TABLE_BITS)).astype(np.int64),
        (unique % np.uint64(1 << TABLE_BITS)).astype(np.int64),
        counts,
        num_texts,
    )


@dataclass(frozen=True)
class LinearModel:
    """Weights by bucket; a bucket that too few of the labelled texts hold has none."""

    idf: F64
    coefficients: F64
    intercept: float
    word_ngrams: int

    def logits(self, texts: Sequence[str], min_known_share: float) -> F64:
        """Log odds per text; NaN where the model knows less than `min_known_share` of the words: another language, or
        another kind of text."""
        parts = [
            self._logits(texts[start : start + TEXTS_AT_ONCE], min_known_share)
            for start in range(0, len(texts), TEXTS_AT_ONCE)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _logits(self, texts: Sequence[str], min_known_share: float) -> F64:
        features, words = features_of(texts, self.word_ngrams)
        sums = np.bincount(features.texts, features.weights(self.idf) * self.coefficients[features.buckets], len(texts))
        num_words = np.bincount(words.texts, words.counts, len(texts))
        num_known = np.bincount(words.texts, words.counts * (self.idf[words.buckets] > 0), len(texts))
        is_judged = (num_words > 0) & (num_known >= min_known_share * num_words)
        return np.where(is_judged, sums + self.intercept, np.nan)

    def save(self, path: Path) -> None:
        """Write the model as arrays, only of the buckets that are not zero."""
        used = np.flatnonzero(self.idf)
        arrays = {"buckets": used, "idf": self.idf[used], "coefficients": self.coefficients[used]}
        with open(path, "wb") as file:
            np.savez(file, **arrays, intercept=np.array(self.intercept), word_ngrams=np.array(self.word_ngrams))


def train_linear_model(
    texts: Sequence[str], is_positive: NDArray[np.bool_], weights: F64, recipe: ClassifierRecipe
) -> LinearModel:
    """Logistic regression with an L2 penalty."""
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

    features, _ = features_of(texts, recipe.word_ngrams)
    frequencies = np.bincount(features.buckets, minlength=1 << TABLE_BITS)
    idf = np.where(frequencies >= recipe.min_texts, np.log((1 + len(texts)) / (1 + frequencies)) + 1, 0.0)
    used = np.flatnonzero(idf)
    columns = np.full(len(idf), -1)
    columns[used] = np.arange(len(used))
    is_used = columns[features.buckets] >= 0
    entries = (features.texts[is_used], columns[features.buckets[is_used]])
    matrix = csr_matrix((features.weights(idf)[is_used], entries), shape=(len(texts), len(used)))
    fitted = LogisticRegression(C=recipe.inverse_penalty, max_iter=1000).fit(matrix, is_positive, sample_weight=weights)
    coefficients = np.zeros(len(idf))
    coefficients[used] = fitted.coef_[0]
    return LinearModel(idf, coefficients, float(fitted.intercept_[0]), recipe.word_ngrams)


@cache
def load_linear_model(path: str) -> LinearModel:
    """The model of a file, read once per process."""
    with np.load(path, allow_pickle=False) as arrays:
        idf, coefficients = np.zeros(1 << TABLE_BITS), np.zeros(1 << TABLE_BITS)
        idf[arrays["buckets"]], coefficients[arrays["buckets"]] = arrays["idf"], arrays["coefficients"]
        return LinearModel(idf, coefficients, float(arrays["intercept"]), int(arrays["word_ngrams"]))
