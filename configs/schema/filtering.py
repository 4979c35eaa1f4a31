"""Which documents stay, and what is masked in them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen


class HeuristicRecipe(Frozen):
    """Bounds of the rules of Gopher, C4 and FineWeb (tasks/data/filtering/heuristics.py); a document outside one is
    dropped under that reason. In brackets the papers' values, which full scale uses; a value on its bound passes."""

    min_words: int = Field(ge=0)
    """Gopher: 50. Words of code do not count, except in the domains code and commit."""
    min_math_words: int = Field(ge=0)
    """In mathematics (domain `math`, or a tenth of the words in formulas): a problem with its solution may be short."""
    min_code_words: int = Field(ge=0)
    """In the domains code and commit: a repository's small files belong to it."""
    max_words: int = Field(gt=0)
    """Gopher: 100,000."""
    min_mean_word_length: float = Field(ge=0)
    """Gopher: 3."""
    max_mean_word_length: float = Field(gt=0)
    """Gopher: 10."""
    max_symbol_word_ratio: float = Field(ge=0)
    """Hash signs per word, and ellipses per word (Gopher: 0.1 for either)."""
    max_bullet_line_share: float = Field(ge=0, le=1)
    """Gopher: 0.9."""
    max_ellipsis_line_share: float = Field(ge=0, le=1)
    """Gopher: 0.3."""
    min_alphabetic_word_share: float = Field(ge=0, le=1)
    """Gopher: 0.8."""
    min_math_alphabetic_word_share: float = Field(ge=0, le=1)
    """In mathematics, whose sentences hold numbers: 1 % of GSM8K's problems with solutions are below 0.67, none of
    7,473 below 0.48."""
    min_stop_words: int = Field(ge=0)
    """Different stop words of the document's language, where its list is known (Gopher: 2)."""
    max_repeated_line_share: float = Field(ge=0, le=1)
    """Share of lines that occurred before in the document (Gopher: 0.3)."""
    max_repeated_line_char_share: float = Field(ge=0, le=1)
    """Share of characters in such lines (FineWeb: 0.1; Gopher: 0.2)."""
    max_repeated_paragraph_share: float = Field(ge=0, le=1)
    """Gopher: 0.3."""
    max_repeated_paragraph_char_share: float = Field(ge=0, le=1)
    """Gopher: 0.2."""
    max_top_ngram_shares: tuple[float, float, float]
    """Share of characters in the most frequent n-gram of 2, 3, 4 words (Gopher: 0.2, 0.18, 0.16)."""
    max_repeated_ngram_shares: tuple[float, float, float, float, float, float]
    """Share of characters in n-grams of 5 to 10 words that occurred before (Gopher: 0.15 down to 0.10)."""
    min_sentences: int = Field(ge=0)
    """C4: 3."""
    max_curly_bracket_share: float = Field(ge=0, le=1)
    """Share of the characters of prose. Code in a document is not counted. C4 drops a page with any bracket, to
    drop code; a text about code contains some."""
    max_lorem_ipsum: int = Field(ge=0)
    """Occurrences of `lorem ipsum` (C4: 0)."""
    max_policy_line_share: float = Field(ge=0, le=1)
    """Lines about JavaScript, cookies, privacy policies and terms of use. C4 removes such lines, whatever their
    share."""
    min_terminated_line_share: float = Field(ge=0, le=1)
    """Lines that end with punctuation (FineWeb: 0.12)."""
    max_short_line_share: float = Field(ge=0, le=1)
    """Lines of less than 30 characters (FineWeb: 0.67)."""


class ScoreRecipe(Frozen):
    """Bounds on the scores of score_documents. A score that is absent passes and is counted as unscored."""

    allowed_languages: tuple[str, ...] = Field(min_length=1)
    """ISO 639 codes; `*` allows all."""
    min_language_score: float = Field(ge=0, le=1)
    """Probability of the language (FineWeb: 0.65)."""
    max_toxicity: float = Field(ge=0, le=1)
    """S0: 0.3."""
    max_perplexity_percentile: float = Field(gt=0, le=1)
    """Share of the held-out reference documents of its language that a document's perplexity may exceed; at 1 nothing
    is dropped. S0's bound of 500 depends on a model that it does not describe. Without reference text, or a model of
    the language, nothing is dropped."""
    min_factuality: float = Field(ge=0, le=1)
    """S0: 0.7."""


class FilterRecipe(Frozen):
    heuristics: HeuristicRecipe
    scores: ScoreRecipe
    max_removed_share: float = Field(gt=0, le=1)
    """Share of one source's, language's or domain's documents that one bound may drop; above it the run stops and names
    the bound and examples. `allowed_languages` is exempt."""
    num_quality_buckets: int = Field(gt=0)
    """Equal parts of the scored documents that pass everything else, by quality (Nemotron-CC)."""
    num_dropped_buckets: int = Field(ge=0)
    """How many of the lowest are dropped (GLM-4.5 drops the lowest)."""
    max_dropped_quality: float = Field(ge=0, le=1)
    """Documents of the dropped buckets whose quality is higher stay: the lowest fifth of a good corpus is good."""
    block_list: str = Field(min_length=1)
    """File of documents that are never trained on, one a line by URL, or by id and text; `glm46 forget --apply` adds to
    it. A relative path is below GLM46_HOME, and where no such file is, nothing is blocked; an absolute one must
    exist."""

    @model_validator(mode="after")
    def _something_stays(self) -> Self:
        if self.num_dropped_buckets >= self.num_quality_buckets:
            raise ValueError(
                f"num_dropped_buckets ({self.num_dropped_buckets}) must stay below num_quality_buckets "
                f"({self.num_quality_buckets}): "
                "else no scored document is left"
            )
        return self


class PersonalDataRecipe(Frozen):
    kinds: tuple[Literal["secret", "email", "iban", "credit_card", "us_ssn", "ip_address", "phone"], ...]
    """Personal data of these kinds is replaced by its kind in angle brackets; in code and commits only secrets and
    e-mail addresses."""
