"""Scores texts with the fastText classifiers that train_classifiers left. Runs in executors: imports no Spark.

Features are lower-case words and single signs, and runs of words where the classifier was trained with them. A text whose words the
classifier mostly does not know (another language, program code) gets no score: its signs alone would decide.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tasks.data.language_id import load_fasttext

if TYPE_CHECKING:
    from collections.abc import Sequence

WORD_OR_SIGN = re.compile(r"[^\W_]+|[^\w\s]")
"""An underscore separates: a label of fastText's format cannot come from a text."""
BETWEEN_WORDS = "\u2581"
POSITIVE, NEGATIVE = "__label__1", "__label__0"
MOST_EXTREME = 1e-6
"""Probabilities nearer to 0 or 1 are taken as this far away: a logit must be finite."""


@dataclass(frozen=True)
class TextClassifier:
    """One trained classifier: where its model lies, and how its output becomes a probability."""

    kind: str
    path: str
    slope: float
    intercept: float
    """Probability = sigmoid(slope * logit(fastText's probability) + intercept)."""
    word_ngrams: int
    max_chars: int
    min_known_share: float

    def scores(self, texts: Sequence[str]) -> list[float | None]:
        """The probability of the kind per text, at equal odds beforehand; None where too few words are known."""
        return [self._score(text) for text in texts]

    def _score(self, text: str) -> float | None:
        words = words_of(text[: self.max_chars])
        vocabulary = _vocabulary(self.path)
        known = [word for word in words if word in vocabulary]
        num_words = sum(map(str.isalnum, words))
        if not num_words or sum(map(str.isalnum, known)) < self.min_known_share * num_words:
            return None
        features = known if self.word_ngrams == 1 else [item for item in features_of(words, self.word_ngrams) if item in vocabulary]
        return calibrated(raw_probability(self.path, features), self.slope, self.intercept)


def words_of(text: str) -> list[str]:
    """Lower-case words and single signs."""
    return WORD_OR_SIGN.findall(text.lower())


def features_of(words: list[str], word_ngrams: int) -> list[str]:
    """The words and their runs up to a length, each a feature."""
    found = list(words)
    for size in range(2, word_ngrams + 1):
        found += map(BETWEEN_WORDS.join, zip(*(words[start:] for start in range(size)), strict=False))
    return found


def raw_probability(path: str, features: Sequence[str]) -> float:
    """What the model of a file gives its positive label."""
    labels, probabilities = load_fasttext(path).predict(" ".join(features), k=2)
    return next((float(value) for label, value in zip(labels, probabilities, strict=True) if label == POSITIVE), 0.0)


def calibrated(probability: float, slope: float, intercept: float) -> float:
    """A probability on the scale of the held-out records."""
    return 1.0 / (1.0 + math.exp(-(slope * logit(probability) + intercept)))


def logit(probability: float) -> float:
    """Log odds, finite for 0 and 1."""
    held = min(max(probability, MOST_EXTREME), 1 - MOST_EXTREME)
    return math.log(held / (1 - held))


@cache
def _vocabulary(path: str) -> frozenset[str]:
    return frozenset(map(str, load_fasttext(path).words))
