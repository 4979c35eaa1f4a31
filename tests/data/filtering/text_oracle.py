"""Every measure of tasks/data/filtering/heuristics.py as a few plain lines of Python over one text: the oracle of its
tests."""

from __future__ import annotations

import re
from collections import Counter

from tasks.data.filtering.heuristics import POLICY_PHRASES, SHORT_LINE_CHARS
from tasks.data.text.stop_words import STOP_WORDS
from tasks.data.text.text_lines import BULLETS, CLOSERS, LINE_ENDS, PROSE_SENTENCES, TERMINATORS, WIDE_TERMINATORS
from tasks.data.text.words import SINGLE_RANGES

SPACES = "".join(map(chr, [*range(33), 0x85, 0xA0, *range(0x2000, 0x200B), 0x3000]))
ENDS = re.escape(TERMINATORS)
SINGLES = "".join(f"{chr(start)}-{chr(stop)}" for start, stop in SINGLE_RANGES)


def words_of(text: str) -> list[str]:
    return re.findall(rf"(?=\w)[{SINGLES}]|(?:(?![{SINGLES}])\w)+", text.lower())


def lines_of(text: str) -> list[str]:
    return [line.strip(SPACES) for line in text.split("\n") if line.strip(SPACES)]


def paragraphs_of(text: str) -> list[str]:
    blank = re.compile(rf"\n(?:[{re.escape(SPACES.replace(chr(10), ''))}]*\n)+")
    return [part.strip(SPACES) for part in blank.split(text) if part.strip(SPACES)]


def repeated(parts: list[str]) -> tuple[float, float]:
    seen, again = set(), []
    for part in parts:
        again += [part] if part in seen else []
        seen.add(part)
    return len(again) / max(len(parts), 1), sum(map(len, again)) / max(sum(map(len, parts)), 1)


def num_sentences(text: str) -> int:
    closers = re.escape(CLOSERS)
    parts = re.split(
        rf"(?:(?<=[{re.escape(WIDE_TERMINATORS)}])|(?<=[{ENDS}])(?=[{closers}{ENDS}]*(?:[{re.escape(SPACES)}]|$)))",
        text,
    )
    return sum(bool(part.strip(SPACES + CLOSERS + TERMINATORS)) for part in parts)


def is_terminated(line: str) -> bool:
    in_brackets = len(line) > 2 and line[-1] in CLOSERS and line[-2] in TERMINATORS and line[-3] not in TERMINATORS
    return line[-1] in LINE_ENDS or in_brackets or num_sentences(f"{line} x") > PROSE_SENTENCES


def is_bullet(line: str) -> bool:
    return line[0] in BULLETS and (line[0] not in "-*" or len(line) == 1 or line[1] in SPACES)


def top_ngram_share(text: str, size: int) -> float:
    words = words_of(text)
    grams = Counter(tuple(words[index : index + size]) for index in range(len(words) - size + 1))
    if not grams or max(grams.values()) < 2:
        return 0.0
    best = max((count, len(re.sub(rf"(?<=[{SINGLES}]) ", "", " ".join(gram)))) for gram, count in grams.items())
    return best[0] * best[1] / len(text)


def repeated_ngrams_share(text: str, size: int) -> float:
    words, seen, covered = words_of(text), set(), set()
    for index in range(len(words) - size + 1):
        gram = tuple(words[index : index + size])
        covered |= set(range(index, index + size)) if gram in seen else set()
        seen.add(gram)
    return sum(len(words[index]) for index in covered) / max(len(text), 1)


def measures_of(text: str, language: str) -> dict[str, float]:
    words, lines, lower = words_of(text), lines_of(text), text.lower()
    n = max(len(words), 1)
    m = max(len(lines), 1)
    lines_repeated, paragraphs_repeated = repeated(lines), repeated(paragraphs_of(text))
    return {
        "num_words": len(words),
        "mean_word_length": sum(map(len, words)) / n if words else float("nan"),
        "hash_word_ratio": text.count("#") / n if words else 0.0,
        "ellipsis_word_ratio": (text.count("…") + text.count("...")) / n if words else 0.0,
        "bullet_line_share": sum(is_bullet(line) and not is_terminated(line) for line in lines) / m,
        "ellipsis_line_share": sum(line.endswith(("...", "…")) for line in lines) / m,
        "alphabetic_word_share": sum(any(c.isalpha() for c in word) for word in words) / n if words else 1.0,
        "num_stop_words": len(set(words) & set(STOP_WORDS[language].split()))
        if language in STOP_WORDS
        else float("nan"),
        "repeated_line_share": lines_repeated[0],
        "repeated_line_char_share": lines_repeated[1],
        "repeated_paragraph_share": paragraphs_repeated[0],
        "repeated_paragraph_char_share": paragraphs_repeated[1],
        **{f"top_{size}gram_share": top_ngram_share(text, size) for size in (2, 3, 4)},
        **{f"repeated_{size}grams_share": repeated_ngrams_share(text, size) for size in range(5, 11)},
        "num_sentences": num_sentences(text),
        "curly_bracket_share": (text.count("{") + text.count("}")) / max(len(text), 1),
        "num_lorem_ipsum": lower.count("lorem ipsum"),
        "policy_line_share": sum(any(phrase in line.lower() for phrase in POLICY_PHRASES) for line in lines) / m,
        "terminated_line_share": sum(map(is_terminated, lines)) / m,
        "short_line_share": sum(len(line) < SHORT_LINE_CHARS for line in lines) / m,
    }
