"""How documents are scored: classifiers, languages, language models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import Frozen, PackagedEncoder
from configs.schema.sources import ExtractionRecipe, IngestRecipe

ClassifierKind = Literal["toxicity", "quality", "factuality"]
"""Kinds of classifiers that labelled records may train."""


class ClassifierRecipe(Frozen):
    """Trains classifiers over words from labelled records of the sources, one per kind that has records."""

    positive_labels: dict[ClassifierKind, tuple[str, ...]]
    """Labels that count as positive, by kind; every other label is negative."""
    min_records: int = Field(ge=20)
    """A kind with fewer labelled records stops the run."""
    num_folds: int = Field(ge=2)
    """Every record is held out once: each fold, by the hash of its text, is scored by a model trained on the others."""
    min_auc: float = Field(ge=0.5, lt=1)
    """A classifier that ranks the held-out records worse than this scores nothing; the record says so."""
    prior: dict[ClassifierKind, Annotated[float, Field(gt=0, lt=1)]]
    """Share of all documents that probabilities assume to be positive. The labelled records do not show it: most
    labelled tweets are toxic."""
    encoder: Literal["", PackagedEncoder]
    """Packaged text encoder that reads passages whose words do not decide whether they are toxic; empty: the words
    decide. On texts of other kinds than the labels the area under the curve is 0.93 with it, 0.80 without
    (docs/data.md)."""
    flagged_above: float = Field(gt=0, lt=1)
    """Toxicity above which a sentence of data_contracts/toxicity_sentences.py counts as flagged;
    `filter.scores.max_toxicity` at least."""
    max_flagged_harmless: float = Field(ge=0, le=1)
    """With a larger share of the harmless sentences flagged, toxicity is not scored and its bound drops nothing."""
    word_ngrams: int = Field(ge=1, le=3)
    """Runs of up to this many words and signs are features, too."""
    min_texts: int = Field(gt=0)
    """Least number of records that must hold a word, or run of words, for it to be a feature."""
    inverse_penalty: float = Field(gt=0)
    """scikit-learn's C of the logistic regression over words: the larger, the closer it fits the records."""
    max_chars: int = Field(gt=0)
    """Characters from the start of a document that are scored."""
    min_known_share: float = Field(gt=0, le=1)
    """Least share of a document's words that the classifier must know to score it. A document below it is in
    another language or of another kind."""


class LanguageRecipe(Frozen):
    max_chars: int = Field(gt=0)
    """Characters from the start of a document by which its language is identified."""
    model_path: str
    """A fastText model that names languages, such as lid.176.bin or GlotLID, on a file system that executors see; empty
    for the three identifiers that come with the packages."""
    model_sha256: str = Field(pattern="^([0-9a-f]{64})?$")
    """sha256 of that file: a run with another file stops."""

    @model_validator(mode="after")
    def _has_a_digest(self) -> LanguageRecipe:
        if bool(self.model_path) != bool(self.model_sha256):
            raise ValueError(
                f"model_path ({self.model_path!r}) and model_sha256 ({self.model_sha256!r}): give both, or leave both "
                f"empty; "
                "`sha256sum FILE` prints the digest"
            )
        return self


class NgramModelRecipe(Frozen):
    order: int = Field(gt=0, le=5)
    """Words per n-gram."""
    min_count: int = Field(gt=0)
    """N-grams, also single words, that occur fewer times are forgotten; their mass goes to shorter ones and to unknown
    words."""
    min_language_bytes: int = Field(gt=0)
    """A language with less reference text (role `reference`) has no model, and its documents no perplexity. From 0.1 to
    4 MB of an encyclopedia the separation of judged pages is about the same (AUC 0.80 to 0.82): the percentiles of
    `held_out_documents` need more."""
    held_out_documents: int = Field(gt=0)
    """Reference documents, by hash, that a model does not learn from: the perplexity of documents is ranked among
    theirs. At most a quarter is held out, and a language for which that is less has no model. With 400 the share of
    judged good pages above the 99th percentile varied by 0.3 to 3 points between draws (standard deviation), with 100
    by 3 to 7."""
    max_language_bytes: int = Field(gt=0)
    """Average bytes of text per language on which its model is trained: documents are taken by the hash of their id."""
    max_bytes: int = Field(gt=0)
    """Average bytes of reference text of all languages together that are read for that."""


class NgramTrainingRecipe(Frozen):
    """The settings that decide a language model, with those of language identification. Made by
    `DataRecipe.ngram_training`."""

    language: LanguageRecipe
    ngram_model: NgramModelRecipe
    ingest: IngestRecipe
    """How reference text is read; documents have been read already."""
    extract: ExtractionRecipe
