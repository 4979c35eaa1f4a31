"""Words, n-grams and shingles against plain Python."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from tasks.data.records.documents import content_digest, cut_pieces, document_id
from tasks.data.text.words import ngram_hashes, split_words

TEXTS = [
    "",
    "   ",
    "one",
    "The quick_brown fox,  the LAZY dog's 3.14!",
    "Äpfel über Straße\tcafé naïve",
    "中文 字 and kana カナ",
    "a\nb\n\nc",
    "привет мир, Ελλάδα",
    "x" * 1000,
    "emoji 😀 astral 𝒳 end",
    "combine e\u0301 mark",
]
SINGLE = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


def plain_words(text: str) -> list[str]:
    """The definition, one text at a time."""
    spaced = SINGLE.sub(lambda match: f" {match[0]} ", text)
    return re.findall(r"[\w\u0300-\u036f]+", "".join(c.lower() if len(c.lower()) == 1 else c for c in spaced))


def test_words_are_those_of_the_plain_definition():
    words = split_words(TEXTS)
    assert words.counts.tolist() == [len(plain_words(text)) for text in TEXTS]
    assert words.lengths.tolist() == [len(word) for text in TEXTS for word in plain_words(text)]


def test_equal_words_have_equal_hashes_wherever_they_stand_and_different_words_different_ones():
    by_word: dict[str, set[int]] = {}
    for texts in (TEXTS, TEXTS[::-1], *([text] for text in TEXTS)):
        for word, value in zip(
            [word for text in texts for word in plain_words(text)], split_words(texts).hashes.tolist(), strict=True
        ):
            by_word.setdefault(word, set()).add(value)
    assert all(len(values) == 1 for values in by_word.values())
    assert len({value for values in by_word.values() for value in values}) == len(by_word)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ngrams_equal_exactly_where_the_words_do(size):
    generator = random.Random(1)
    texts = [" ".join(generator.choices("abcd", k=generator.randint(0, 12))) for _ in range(60)]
    hashes, owners = ngram_hashes(split_words(texts), size, whole_if_shorter=True)
    hashed = [set(hashes[owners == number].tolist()) for number in range(len(texts))]
    plain = []
    for text in texts:
        words = text.split()
        grams = {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}
        plain.append(grams or ({tuple(words)} if words else set()))
    for left in range(len(texts)):
        for right in range(left, len(texts)):
            assert len(hashed[left] & hashed[right]) == len(plain[left] & plain[right])


def test_operators_are_words_only_where_they_stand_alone():
    counts = split_words(["12 + 7 = 19", "3 - 7 = -4", "a == b -> c", "=====", "- item"], with_operators=True).counts
    assert counts.tolist() == [5, 6, 3, 0, 2]
    assert split_words(["12 + 7 = 19"]).counts.tolist() == [3]


def test_a_batch_of_empty_texts_has_no_words():
    words = split_words(["", ""])
    assert words.counts.tolist() == [0, 0]
    assert [len(part) for part in ngram_hashes(words, 3, whole_if_shorter=True)] == [0, 0]
    assert len(split_words([]).hashes) == 0


def test_pieces_join_to_the_text_and_end_at_paragraphs_where_they_can():
    text = "\n\n".join(f"Paragraph {number} " + "word " * 30 for number in range(50))
    pieces = cut_pieces(text, 1000)
    assert "".join(piece for _, piece in pieces) == text
    assert [start for start, _ in pieces] == np.cumsum([0, *[len(piece) for _, piece in pieces[:-1]]]).tolist()
    assert all(len(piece) <= 1000 for _, piece in pieces) and all(piece.endswith("\n\n") for _, piece in pieces[:-1])
    assert cut_pieces("x" * 2500, 1000) == [(0, "x" * 1000), (1000, "x" * 1000), (2000, "x" * 500)]
    assert cut_pieces("short", 1000) == [(0, "short")]


def test_identity_is_the_address_and_content_digest_the_normalised_text():
    assert document_id("a.txt", 0, 0) != document_id("a.txt", 0, 1) != document_id("a.txt", 1, 0)
    assert re.fullmatch("[0-9a-f]{16}", document_id("a.txt", 0, 0))
    assert content_digest("caf\u00e9  x\n") == content_digest("cafe\u0301 x")
    assert content_digest("a b") != content_digest("ab")
