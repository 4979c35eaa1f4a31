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
from tasks.data.text.prose_text import are_mathematics, prose_of
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


def classifier_scores(classifiers: Sequence[TextClassifier], texts: Sequence[str]) -> dict[str, list[float | None]]:
    """The score of each text, by kind."""
    longest = max((classifier.max_chars for classifier in classifiers), default=0)
    proses = [judged_prose(text[:longest]) for text in texts] if classifiers else []
    return {classifier.kind: classifier.scores(proses) for classifier in classifiers}


def judged_prose(text: str) -> str | None:
    """The prose of a text; None where it is mathematics or mostly code."""
    prose = prose_of(text)
    num_letters = sum(map(str.isalpha, text))
    is_prose = sum(map(str.isalpha, prose.text)) >= MIN_PROSE_SHARE * num_letters
    is_mathematics = are_mathematics([prose.num_formula_words], split_words([prose.text]).counts)[0]
    return prose.text if is_prose and not is_mathematics else None


def passages_of(text: str) -> list[str]:
    """A text in passages, in order."""
    return PASSAGE.findall(text)


@cache
def load_head(path: str) -> F64:
    """The weights of a reader, the last one its intercept; read once per process."""
    return np.load(Path(path), allow_pickle=False)
