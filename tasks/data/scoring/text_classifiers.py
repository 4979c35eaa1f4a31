"""Scores texts with the classifiers that train_classifiers wrote. Runs in executors: imports no Spark.

Prose was labelled, so a text is judged by its prose. Some texts get no score: mathematics, texts that hold more code
than prose, and texts with too few words that the classifier knows (another language). An absent score breaks no
bound, and is counted.

A long text is judged by passages: its toxicity is the mean of its worst tenth, of at least one passage. So a page is
toxic because of one paragraph in ten, and a book is not because of one sentence. The words decide which passages
those are. A text encoder also reads a passage that the words leave in doubt. Most documents have none, and pay
nothing for it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.files.stored_files import StoredFile, local_copy
from tasks.data.embedding.passage_encoder import encode_passages
from tasks.data.scoring.linear_model import LinearModel, load_linear_model
from tasks.data.text.prose_text import Beginnings, are_mathematics
from tasks.data.text.words import split_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    F64 = NDArray[np.float64]

MIN_PROSE_SHARE = 0.7
"""Least share of a text's letters that are prose: none of 541 web pages has less, half of the bug reports have."""
PASSAGE_CHARS = 400
PASSAGE = re.compile(
    rf"\S(?:.{{0,{PASSAGE_CHARS - 2}}}[.!?\n](?=\s)|.{{0,{PASSAGE_CHARS - 1}}}(?=\s|$)|.{{1,{PASSAGE_CHARS - 1}}})",
    re.DOTALL,
)
"""Matches up to PASSAGE_CHARS characters, to the end of a sentence where there is one, else to the end of a word."""
WORST_SHARE = 0.1
NOT_ASCII = re.compile("[^\x00-\x7f]+")
ASCII_WITHOUT_LETTERS = bytes(byte for byte in range(128) if not chr(byte).isalpha())
SCORE_DIGITS = 6
"""Scores are rounded: processors differ in the last digits."""


@dataclass(frozen=True)
class Calibration:
    """Probability = sigmoid(slope * log odds + intercept), at the share of positive documents that the recipe
    assumes."""

    slope: float
    intercept: float

    def probabilities(self, logits: F64) -> F64:
        return 1.0 / (1.0 + np.exp(-np.clip(self.slope * logits + self.intercept, -30, 30)))


@dataclass(frozen=True)
class PassageReader:
    """The text encoder for passages that the model over words leaves in doubt."""

    encoder: str
    """A packaged model, tasks/data/embedding/embedding_model.py."""
    file: StoredFile
    """The weights of its vectors."""
    from_logit: float
    """Passages with lower log odds by their words are clean, and are not read."""
    calibration: Calibration

    def probabilities(self, passages: Sequence[str]) -> F64:
        weights = load_head(local_copy(self.file))
        return self.calibration.probabilities(encode_passages(passages, self.encoder) @ weights[:-1] + weights[-1])


@dataclass(frozen=True)
class TextClassifier:
    """One trained classifier: the path of its model, and how its output becomes a probability."""

    kind: str
    file: StoredFile
    calibration: Calibration
    max_chars: int
    """Characters from the start of a document that are scored."""
    min_known_share: float
    is_by_passage: bool
    reader: PassageReader | None

    def scores(self, proses: Sequence[str | None]) -> list[float | None]:
        """The probability of the kind per text; None where there is no prose or too few of its words are known."""
        given = [index for index, prose in enumerate(proses) if prose is not None]
        texts = [(proses[index] or "")[: self.max_chars] for index in given]
        judged = self._by_passage(texts) if self.is_by_passage else self._by_text(texts)
        result: list[float | None] = [None] * len(proses)
        for index, score in zip(given, judged, strict=True):
            result[index] = None if math.isnan(score) else round(float(score), SCORE_DIGITS)
        return result

    def _by_text(self, texts: list[str]) -> F64:
        return self.calibration.probabilities(
            load_linear_model(local_copy(self.file)).logits(texts, self.min_known_share)
        )

    def _words(self) -> LinearModel:
        return load_linear_model(local_copy(self.file))

    def _by_passage(self, texts: list[str]) -> F64:
        passages = [passages_of(text) for text in texts]
        logits = self._words().logits([passage for own in passages for passage in own], self.min_known_share)
        ends = np.cumsum([len(own) for own in passages])
        return np.array(
            [self._worst(own, logits[end - len(own) : end]) for own, end in zip(passages, ends.tolist(), strict=True)]
        )

    def _worst(self, passages: list[str], logits: F64) -> float:
        """The mean probability of the worst tenth; NaN where fewer than half of the passages can be judged."""
        known = np.flatnonzero(~np.isnan(logits))
        if not len(known) or 2 * len(known) < len(passages):
            return math.nan
        worst = known[np.argsort(-logits[known], kind="stable")[: math.ceil(WORST_SHARE * len(known))]]
        probabilities = self.calibration.probabilities(logits[worst])
        if self.reader:
            in_doubt = logits[worst] >= self.reader.from_logit
            if in_doubt.any():
                probabilities[in_doubt] = self.reader.probabilities([passages[index] for index in worst[in_doubt]])
        return float(probabilities.mean())


def described_classifier(kind: str, described: dict[str, Any], file_of: Callable[[str], StoredFile]) -> TextClassifier:
    """A classifier from its entry in classifiers.json and its files."""
    reader = described["reader"]
    return TextClassifier(
        kind,
        file_of(f"models/{kind}.npz"),
        Calibration(*described["calibration"]),
        described["max_chars"],
        described["min_known_share"],
        described["is_by_passage"],
        PassageReader(
            reader["encoder"], file_of(f"models/{kind}.npy"), reader["from_logit"], Calibration(*reader["calibration"])
        )
        if reader
        else None,
    )


def classifier_scores(classifiers: Sequence[TextClassifier], beginnings: Beginnings) -> dict[str, list[float | None]]:
    """The score of each text, by kind."""
    longest = max((classifier.max_chars for classifier in classifiers), default=0)
    proses = judged_proses(beginnings, longest) if classifiers else []
    return {classifier.kind: classifier.scores(proses) for classifier in classifiers}


def judged_proses(beginnings: Beginnings, max_chars: int) -> list[str | None]:
    """The prose of each text's first `max_chars` characters; None where it is mathematics or mostly code."""
    proses = beginnings.proses(max_chars)
    num_words = split_words([prose.text for prose in proses]).counts
    is_mathematics = are_mathematics([prose.num_formula_words for prose in proses], num_words).tolist()
    is_prose = [
        num_letters(prose.text) >= MIN_PROSE_SHARE * num_letters(text[:max_chars])
        for text, prose in zip(beginnings.texts, proses, strict=True)
    ]
    return [
        prose.text if is_judged and not is_formulas else None
        for prose, is_judged, is_formulas in zip(proses, is_prose, is_mathematics, strict=True)
    ]


def num_letters(text: str) -> int:
    """Letters of all scripts."""
    ascii_letters = text.encode("ascii", "ignore").translate(None, ASCII_WITHOUT_LETTERS)
    return len(ascii_letters) + sum(map(str.isalpha, "".join(NOT_ASCII.findall(text))))


def passages_of(text: str) -> list[str]:
    """A text in passages, in order."""
    return PASSAGE.findall(text)


@cache
def load_head(path: str) -> F64:
    """The weights of a reader, the last one its intercept; read once per process."""
    return np.load(Path(path), allow_pickle=False)
