"""The heuristic quality rules of Gopher, C4 and FineWeb, over many texts at once.

Gopher: Rae et al. 2021 (arXiv 2112.11446), A1.1 and table A1. C4: Raffel et al. 2020 (1910.10683), 2.2. FineWeb:
Penedo et al. 2024 (2406.17557), 3.6. Every rule is a number per document, compared with a bound. The first rule
outside its bound, in the order of `RULES`, is the reason.

The papers examined English web pages. So a rule measures the prose of a document (tasks/data/text/prose_text.py):
code and formulas are left out, wrapped lines are joined. Mathematics has bounds of its own where the papers' would
drop it. Its own collections (OpenWebMath, Paster et al. 2023, 2310.06786; FineMath, Allal et al. 2025, 2502.02737;
Nemotron-CC-Math, 2508.15096) use classifiers and perplexity and none of these rules. Only the word counts apply to
program code, commits and issue threads. A rule that has no meaning in a language's script has the value NaN there,
which every bound allows.

C4 removes single lines (without terminal punctuation, with "javascript", with a policy notice). Here no line is
removed from a document, whose text stays a range of its source. What C4 counts per line is a share of the document's
lines. Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tasks.data.filtering.repetition import (
    COVERED_SIZES,
    TOP_SIZES,
    chars_per_word,
    measure_repetition,
    repeated_ngrams_name,
    top_ngram_name,
)
from tasks.data.records.documents import CODE, COMMIT, ISSUE, MATH, names_of
from tasks.data.text.prose_text import Prose, are_mathematics, prose_of
from tasks.data.text.stop_words import count_stop_words
from tasks.data.text.text_chunks import chunk_bounds
from tasks.data.text.text_lines import DOT, ELLIPSIS, Lines, count_sentences, find_phrases, share, sums
from tasks.data.text.words import code_points, split_words

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from configs.schema import HeuristicRecipe

    F64 = NDArray[np.float64]
    Bools = NDArray[np.bool_]

REASON_COLUMNS = "id string, collection string, domain string, language string, reason string, millionths int"
CHUNK_CHARS = 400_000
SHORT_LINE_CHARS = 30
"""Characters of a short line (FineWeb, 3.6)."""
POLICY_PHRASES = (
    "javascript",
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
"""Phrases of lines that C4 removes (the `javascript` and policy rules of its published code)."""
WITHOUT_SENTENCE_MARKS = ("th", "lo")
"""Languages that end sentences with a space."""
OTHER_WORD_LENGTHS = ("ko", "bo", "dz", "ml", "kl", "ak", "haw", "mi", "ty", "sm", "to", "fj")
"""Languages whose words are not of 3 to 10 letters on average, in the Declaration of Human Rights: syllables are
written as one character (Korean 2.9) or apart (Tibetan 2.9, Hawaiian 2.8), or words are whole clauses (Malayalam 10.1,
Kalaallisut 14.6)."""
HASH, OPENING, CLOSING = ord("#"), ord("{"), ord("}")
PROSE = "prose"
KIND_OF_DOMAIN = {CODE: CODE, COMMIT: CODE, ISSUE: ISSUE, MATH: MATH}
"""Kind whose rules apply, by domain; PROSE for any other."""


class Rule(NamedTuple):
    """A measure and its bound in HeuristicRecipe."""

    reason: str
    measure: str
    passes: Literal["at_least", "at_most"]
    """Which side of the bound passes; the bound itself does."""
    bound: str
    kinds: tuple[str, ...] = (PROSE, MATH)
    needs_words: bool = False
    """Whether mathematics with fewer words than prose's `min_words` is exempt: an answer repeats the question of a
    one-line problem."""
    math_factor: float = 1.0
    """Factor of the bound in mathematics."""


REPETITION_IN_MATH = 2.0
"""Factor of the bounds for n-grams in mathematics, where a solution repeats its problem: the papers' bounds drop 8 to
17 % of five collections, twice the bounds 0 to 1.7 %."""


def _ngram_rule(reason: str, measure: str, bound: str) -> Rule:
    return Rule(reason, measure, "at_most", bound, needs_words=True, math_factor=REPETITION_IN_MATH)


RULES = (
    Rule("too_few_words", "num_words", "at_least", "min_words", kinds=(PROSE, ISSUE)),
    Rule("too_few_words", "num_words", "at_least", "min_math_words", kinds=(MATH,)),
    Rule("too_few_words", "num_words", "at_least", "min_code_words", kinds=(CODE,)),
    Rule("too_many_words", "num_words", "at_most", "max_words", kinds=(PROSE, MATH, ISSUE, CODE)),
    Rule("words_too_short", "mean_word_length", "at_least", "min_mean_word_length", kinds=(PROSE,)),
    Rule("words_too_long", "mean_word_length", "at_most", "max_mean_word_length"),
    Rule("too_many_hash_signs", "hash_word_ratio", "at_most", "max_symbol_word_ratio"),
    Rule("too_many_ellipses", "ellipsis_word_ratio", "at_most", "max_symbol_word_ratio"),
    Rule("too_many_bullet_lines", "bullet_line_share", "at_most", "max_bullet_line_share"),
    Rule("too_many_ellipsis_lines", "ellipsis_line_share", "at_most", "max_ellipsis_line_share"),
    Rule("too_few_alphabetic_words", "alphabetic_word_share", "at_least", "min_alphabetic_word_share", kinds=(PROSE,)),
    Rule(
        "too_few_alphabetic_words", "alphabetic_word_share", "at_least", "min_math_alphabetic_word_share", kinds=(MATH,)
    ),
    Rule("too_few_stop_words", "num_stop_words", "at_least", "min_stop_words", needs_words=True, math_factor=0.5),
    Rule("repeated_lines", "repeated_line_share", "at_most", "max_repeated_line_share"),
    Rule("repeated_line_characters", "repeated_line_char_share", "at_most", "max_repeated_line_char_share"),
    Rule("repeated_paragraphs", "repeated_paragraph_share", "at_most", "max_repeated_paragraph_share"),
    Rule(
        "repeated_paragraph_characters", "repeated_paragraph_char_share", "at_most", "max_repeated_paragraph_char_share"
    ),
    *(
        _ngram_rule(f"frequent_{size}gram", top_ngram_name(size), f"max_top_ngram_shares.{index}")
        for index, size in enumerate(TOP_SIZES)
    ),
    *(
        _ngram_rule(f"repeated_{size}grams", repeated_ngrams_name(size), f"max_repeated_ngram_shares.{index}")
        for index, size in enumerate(COVERED_SIZES)
    ),
    Rule("too_few_sentences", "num_sentences", "at_least", "min_sentences", kinds=(PROSE,)),
    Rule("curly_brackets", "curly_bracket_share", "at_most", "max_curly_bracket_share"),
    Rule("lorem_ipsum", "num_lorem_ipsum", "at_most", "max_lorem_ipsum"),
    Rule("policy_lines", "policy_line_share", "at_most", "max_policy_line_share"),
    Rule("unterminated_lines", "terminated_line_share", "at_least", "min_terminated_line_share", math_factor=0.5),
    Rule("short_lines", "short_line_share", "at_most", "max_short_line_share", kinds=(PROSE,)),
)


def flat_bounds(recipe: HeuristicRecipe) -> dict[str, float]:
    """Bounds by the names in `RULES`; entries of a tuple are numbered."""
    bounds: dict[str, float] = {}
    for name, value in recipe.model_dump().items():
        numbered = (
            {f"{name}.{index}": part for index, part in enumerate(value)} if isinstance(value, tuple) else {name: value}
        )
        bounds.update(numbered)
    return bounds


def bounds_of(reason: str, bounds: dict[str, float]) -> dict[str, float]:
    """The bounds of a reason, by their names in HeuristicRecipe; for an n-gram rule the tuple's entry."""
    return {rule.bound: bounds[rule.bound] for rule in RULES if rule.reason == reason}


def name_reasons(
    texts: Sequence[str], languages: Sequence[str], domains: Sequence[str], bounds: dict[str, float]
) -> list[str]:
    """The first broken rule of each text, empty where it passes all. A value on its bound passes, and so does NaN."""
    kinds = np.array([KIND_OF_DOMAIN.get(domain, PROSE) for domain in domains], dtype=object)
    proses = [
        prose_of(text) if kind in (PROSE, MATH) else Prose(text, 0) for text, kind in zip(texts, kinds, strict=True)
    ]
    measures = measure([prose.text for prose in proses], languages)
    num_formula_words = [prose.num_formula_words for prose in proses]
    kinds[(kinds == PROSE) & are_mathematics(num_formula_words, measures["num_words"])] = MATH
    measures["num_words"] += num_formula_words
    is_math, is_short = kinds == MATH, measures["num_words"] < bounds["min_words"]
    first = np.full(len(texts), len(RULES))
    for index, rule in reversed(list(enumerate(RULES))):
        values, bound = measures[rule.measure], np.where(is_math, rule.math_factor, 1.0) * bounds[rule.bound]
        is_broken = values > bound if rule.passes == "at_most" else values < bound
        is_held = np.isin(kinds, rule.kinds) & ~(is_math & is_short & rule.needs_words)
        first[is_broken & is_held] = index
    return [RULES[index].reason if index < len(RULES) else "" for index in first.tolist()]


def measure(texts: Sequence[str], languages: Sequence[str]) -> dict[str, F64]:
    """All measures of some texts by name, one value per text.

    mean_word_length is over words of scripts with spaces; NaN where these are less than half of the words. Shares of
    lines are over lines with visible characters, shares of characters in lines over the characters of these lines, all
    other shares over the text's. Sentences and terminated lines are NaN in WITHOUT_SENTENCE_MARKS, mean_word_length in
    OTHER_WORD_LENGTHS."""
    points, starts = code_points(texts)
    num_chars = np.diff(starts)
    words = split_words(texts)
    num_words = words.counts.astype(np.float64)
    spaced = sums(~words.is_single, words.offsets)
    spaced_length = sums(np.where(words.is_single, 0, words.lengths), words.offsets)
    mean_length = np.divide(
        spaced_length, spaced, out=np.full(len(texts), np.nan), where=(spaced > 0) & (2 * spaced >= num_words)
    )
    is_unmarked, is_otherwise_long = np.isin(languages, WITHOUT_SENTENCE_MARKS), np.isin(languages, OTHER_WORD_LENGTHS)
    lines = Lines(points, starts)
    is_terminated = lines.is_terminated()
    repeated_lines, repeated_line_chars = lines.repeated()
    repeated_paragraphs, repeated_paragraph_chars = lines.repeated_paragraphs()
    lorem = find_phrases(points, starts, ("lorem ipsum",))
    policy = find_phrases(points, starts, POLICY_PHRASES)
    return {
        "num_words": num_words,
        "mean_word_length": np.where(is_otherwise_long, np.nan, mean_length),
        "hash_word_ratio": share(sums(points == HASH, starts), num_words),
        "ellipsis_word_ratio": share(_num_ellipses(points, starts), num_words),
        "bullet_line_share": lines.share_of(lines.starts_with_bullet() & ~is_terminated),
        "ellipsis_line_share": lines.share_of(lines.ends_with_ellipsis()),
        "alphabetic_word_share": share(sums(words.has_letter, words.offsets), num_words, empty=1.0),
        "num_stop_words": count_stop_words(words, languages),
        "repeated_line_share": repeated_lines,
        "repeated_line_char_share": repeated_line_chars,
        "repeated_paragraph_share": repeated_paragraphs,
        "repeated_paragraph_char_share": repeated_paragraph_chars,
        **measure_repetition(words, num_chars, chars_per_word(words, points)),
        "num_sentences": np.where(is_unmarked, np.nan, count_sentences(lines.kinds, starts, lines.sentence_ends)),
        "curly_bracket_share": share(sums((points == OPENING) | (points == CLOSING), starts), num_chars),
        "num_lorem_ipsum": np.diff(np.searchsorted(lorem, starts)).astype(np.float64),
        "policy_line_share": lines.share_of(lines.holds(policy)),
        "terminated_line_share": np.where(is_unmarked, np.nan, lines.share_of(is_terminated)),
        "short_line_share": lines.share_of(lines.is_shorter_than(SHORT_LINE_CHARS)),
    }


def filter_batches(batches: Iterator[pa.RecordBatch], bounds: dict[str, float]) -> Iterator[pa.RecordBatch]:
    """REASON_COLUMNS for documents (id, collection, domain, language, text, score_reason, millionths): a score's reason
    comes first."""
    import pyarrow as pa

    for batch in batches:
        texts = batch.column("text").to_pylist()
        languages = batch.column("language").to_pylist()
        domains = batch.column("domain").to_pylist()
        reasons: list[str] = []
        for start, stop in chunk_bounds(map(len, texts), CHUNK_CHARS):
            reasons += name_reasons(texts[start:stop], languages[start:stop], domains[start:stop], bounds)
        first = [earlier or own for earlier, own in zip(batch.column("score_reason").to_pylist(), reasons, strict=True)]
        given = [batch.column(name) for name in ("id", "collection", "domain", "language")]
        columns = [*given, pa.array(first, pa.string()), batch.column("millionths")]
        yield pa.RecordBatch.from_arrays(columns, names=names_of(REASON_COLUMNS))


def _num_ellipses(points: NDArray[np.uint32], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ellipsis characters and full groups of three dots per text."""
    dots = np.flatnonzero(points == DOT)
    text_of_dot = np.searchsorted(starts, dots, side="right")
    begins = np.ones(len(dots), dtype=bool)
    begins[1:] = (np.diff(dots) > 1) | (np.diff(text_of_dot) > 0)
    firsts = np.flatnonzero(begins)
    counts = (points == ELLIPSIS).astype(np.int64)
    counts[dots[firsts]] += np.diff(np.append(firsts, len(dots))) // 3
    return sums(counts, starts)
