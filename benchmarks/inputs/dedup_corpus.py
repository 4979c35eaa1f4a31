"""The corpus of benchmarks/data/dedup.py: documents with planted near-duplicates, cut from the texts of ../shared/data,
and the sets with known duplicates that accuracy is measured on. Everything follows from the texts and a fixed seed.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.data_inputs import SHARED_DATA

TEXT_FILES = (
    "text/gutenberg_en",
    "text/peps",
    "text/movie_reviews",
    "text/us_presidential_speeches",
    "text/wikipedia_plain_sample",
    "text/rust_book",
    "text/c4_sample",
    "text/openstax_python",
    "multilingual/gutenberg_de_fr_es",
    "multilingual/react_docs",
    "multilingual/art_of_command_line",
    "code/python_repos",
    "code/thealgorithms_python",
    "math/gsm8k_test",
)
SEED = 46
EDIT_RATES = (0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1)
"""Share of a copy's words that are replaced: with 5-grams similarities from 1 down to about 0.45; 0 is a copy in other
white space."""
COPY_SHARE, TEMPLATE_SHARE = 0.3, 0.02
MEAN_CHARS = 2760
NUM_DOCUMENTS = 27_771
"""As many as datatrove was timed on; 65 MB."""


@dataclass(frozen=True)
class Corpus:
    """Documents by number."""

    name: str
    texts: list[str]
    clusters: list[str] | None
    """Labels of an input that brings its own."""

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a JSONL file, gzipped or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    yield from (json.loads(line) for line in text.split("\n") if line)


def read_corpus(directory: Path, num_documents: int | None) -> Corpus:
    """A user's JSONL.gz files with id, text and optionally cluster."""
    records = [record for path in sorted(directory.glob("*.jsonl.gz")) for record in json_lines(path)][:num_documents]
    if not records:
        raise SystemExit(f"{directory} holds no *.jsonl.gz file with records: each line needs `id` and `text`")
    clusters = (
        [str(record["cluster"]) for record in records] if all("cluster" in record for record in records) else None
    )
    return Corpus(str(directory), [record["text"] for record in records], clusters)


def build_corpus(num_documents: int) -> Corpus:
    """Pieces of real texts, copies of some of them with words replaced, and pages of one template, in random order.

    Where the texts do not suffice, they are used again, with every sentence's words rotated by one position more: other
    n-grams.
    """
    draw = np.random.default_rng(SEED)
    num_copies, num_pages = int(num_documents * COPY_SHARE), int(num_documents * TEMPLATE_SHARE)
    originals = _cut(_base_texts(), num_documents - num_copies - num_pages, draw)
    vocabulary = np.array(sorted({word for text in originals[:500] for word in text.split()}), dtype=object)
    copies = [
        _edited(originals[index], EDIT_RATES[number % len(EDIT_RATES)], vocabulary, draw)
        for number, index in enumerate(draw.integers(0, len(originals), num_copies).tolist())
    ]
    texts = [*originals, *copies, *_template_pages(num_pages, vocabulary, draw)]
    order = draw.permutation(len(texts))
    return Corpus(f"{num_documents} documents from {SHARED_DATA.name}", [texts[index] for index in order], None)


def _base_texts() -> list[str]:
    paths = [SHARED_DATA / f"{name}.jsonl.gz" for name in TEXT_FILES]
    records = (record for path in paths if path.is_file() for record in json_lines(path))
    return [
        text for record in records for text in [record.get("text") or record.get("content") or ""] if len(text) > 300
    ]


def _cut(texts: list[str], count: int, draw: np.random.Generator) -> list[str]:
    """`count` pieces of about MEAN_CHARS characters, cut at spaces."""
    pieces: list[str] = []
    rotation = 0
    while len(pieces) < count:
        for text in texts:
            source = text if rotation == 0 else " ".join(_rotated(text.split(), rotation))
            start = 0
            while start + 200 < len(source) and len(pieces) < count:
                end = start + int(np.clip(draw.lognormal(np.log(MEAN_CHARS) - 0.32, 0.8), 250, 20_000))
                end = end if end >= len(source) else max(source.rfind(" ", start, end), start + 1)
                pieces.append(source[start:end])
                start = end
        rotation += 1
    return pieces


def _rotated(words: list[str], by: int) -> list[str]:
    """The words in blocks of 3 + `by`, each block backwards: the same words, hardly a common 5-gram."""
    size = 3 + by
    return [word for start in range(0, len(words), size) for word in reversed(words[start : start + size])]


def _edited(text: str, rate: float, vocabulary: np.ndarray, draw: np.random.Generator) -> str:
    parts = re.split(r"(\s+)", text)
    indices = np.arange(0, len(parts), 2)
    for index in indices[draw.random(len(indices)) < rate].tolist():
        parts[index] = str(vocabulary[draw.integers(len(vocabulary))])
    if rate == 0.0:
        return " ".join(part for part in parts[::2] if part) + "\n\n"
    return "".join(parts)


def _template_pages(count: int, vocabulary: np.ndarray, draw: np.random.Generator) -> list[str]:
    """Pages that share 200 words of navigation around 40 to 240 words of their own: similarities on both sides of the
    threshold."""
    frame = [str(word) for word in vocabulary[draw.integers(0, len(vocabulary), 200)]]
    pages = []
    for own in draw.integers(20, 160, count).tolist():
        body = [str(word) for word in vocabulary[draw.integers(0, len(vocabulary), own)]]
        pages.append(" ".join([*frame[:100], *body, *frame[100:]]))
    return pages


@dataclass(frozen=True)
class LabelledSet:
    """Texts and the pairs of them that people call duplicates."""

    name: str
    texts: list[str]
    pairs: set[tuple[int, int]]
    judged: dict[tuple[int, int], str] | None = None
    """Pairs with a degree of sameness instead: nothing is known of the others."""


def labelled_sets() -> list[LabelledSet]:
    """Chapters of different editions, planted articles, judged pairs of web pages."""
    folder = SHARED_DATA / "dedup"
    chapters = list(json_lines(folder / "edition_chapters.jsonl.gz"))
    by_cluster: dict[str, list[int]] = {}
    for number, record in enumerate(chapters):
        by_cluster.setdefault(record["cluster"], []).append(number)
    same = {(left, right) for members in by_cluster.values() for left in members for right in members if left < right}
    articles = list(json_lines(folder / "plagiarised_articles.jsonl.gz"))
    numbers = {record["id"]: number for number, record in enumerate(articles)}
    pairs = [
        sorted((numbers[pair["a"]], numbers[pair["b"]]))
        for pair in json_lines(folder / "plagiarised_articles_pairs.jsonl")
    ]
    judged = list(json_lines(folder / "web_pairs_judged.jsonl.gz"))
    labels = {(2 * number, 2 * number + 1): record["human_label"] for number, record in enumerate(judged)}
    return [
        LabelledSet("edition_chapters", [record["text"] for record in chapters], same),
        LabelledSet(
            "plagiarised_articles", [record["text"] for record in articles], {(low, high) for low, high in pairs}
        ),
        LabelledSet(
            "web_pairs_judged",
            [text for record in judged for text in (record["text_a"], record["text_b"])],
            set(),
            labels,
        ),
    ]
