"""Perplexity by n-gram models: ours beside KenLM.

`python -m benchmarks.data.ngram_model [--write]`   (after `make env-peers`; ../shared/data as in docs/data.md)

Ours builds a trigram model of an encyclopedia and writes it as ARPA, which KenLM reads. Both score the same model, so
the perplexities must be the same but for KenLM's 32-bit floats. Both score the same texts on one core, in turn, round
by round, in processor seconds: `ratio` from text to perplexity, `ratio_from_words` without the splitting into words.
`area` is how often a page that people found poor is more perplexing than one that they found good. KenLM's Python
package has no trainer. Where `lmplz` is on the PATH (compiled from KenLM's sources with Boost: no package has it), its
model of the same words, with modified Kneser-Ney smoothing, is built and judged as well; its time is from words, ours
from text.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.environment import peers_python
from benchmarks.results import WRITE_FLAG, report
from infra.code_digest import ROOT
from tasks.data.extraction.wikitext import is_redirect, wikitext_to_text
from tasks.data.readers.source_bytes import HashingReader
from tasks.data.readers.wiki_dumps import wiki_pages
from tasks.data.scoring.classifier_training import area_under_curve
from tasks.data.scoring.ngram_model import LONGEST_NUMBER, NgramCounts, NgramModel, build_model, count_ngrams, ngrams_of
from tasks.data.text.words import split_words

DATA = ROOT.parent / "shared" / "data"
ARTICLES, JUDGED = "text/enwiki_sample_pages_articles.xml.bz2", "quality/dclm_human_quality.jsonl.gz"
BOOKS = "text/gutenberg_en.jsonl.gz"
"""Scored as well, for the speed."""
ORDER, MIN_COUNT, ROUNDS, MAX_TEXTS = 3, 2, 7, 1_000_000
MAX_RECORD_BYTES, BATCH_TEXTS = 10_000_000, 64


def _articles() -> list[str]:
    with open(DATA / ARTICLES, "rb") as file:
        pages = [page.text or "" for page in wiki_pages(ARTICLES, HashingReader(file), "en", MAX_RECORD_BYTES)]
    return [wikitext_to_text(page) for page in pages if not is_redirect(page)][:MAX_TEXTS]


def _rows(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file][:MAX_TEXTS]


def _built(texts: list[str]) -> NgramModel:
    """What Spark counts and reduces, in one process."""
    found = count_ngrams(texts, ORDER)
    is_longer = found["size"] > 1
    contexts, place = np.unique(found["context"][is_longer], return_inverse=True)
    totals = np.bincount(place, found["num_occurrences"][is_longer]).astype(np.int64)
    kept = (found["size"] == 1) | (found["num_occurrences"] >= MIN_COUNT)
    columns = (found[name][kept] for name in ("size", "hash", "context", "suffix", "num_occurrences"))
    return build_model(NgramCounts(*columns, contexts, totals, np.bincount(place)), ORDER, MIN_COUNT)


def _words(texts: list[str]) -> list[list[str]]:
    """The words of each text as strings, equal where their hashes are."""
    words, joined = split_words(texts), "".join(texts)
    strings = [
        joined[start : start + length].lower() if has_letter else f"#{min(length, LONGEST_NUMBER)}"
        for start, length, has_letter in zip(
            words.starts.tolist(), words.lengths.tolist(), words.has_letter.tolist(), strict=True
        )
    ]
    offsets = words.offsets.tolist()
    return [strings[start:end] for start, end in pairwise(offsets)]


def _write_arpa(model: NgramModel, texts: list[str], path: Path) -> None:
    ngrams = ngrams_of(texts, model.order)
    words = [word for text in _words(texts) for word in text]
    base = np.log(10)
    sections = [f"{model.log_unknown / base:.9f}\t<unk>\t0\n-99\t<s>\t0\n-99\t</s>"]
    counts = [3]
    for size in range(1, model.order + 1):
        starts = np.flatnonzero(ngrams.is_whole[size - 1])
        hashes, first = np.unique(ngrams.hashes[size - 1][starts], return_index=True)
        rows = model.rows_of(hashes)
        begins, rows = starts[first[rows >= 0]], model.rows[rows[rows >= 0]]
        tails = [f"\t{backoff / base:.9f}" if size < model.order else "" for backoff in rows["log_backoff"]]
        lines = [
            f"{log / base:.9f}\t{' '.join(words[begin : begin + size])}{tail}"
            for begin, log, tail in zip(begins.tolist(), rows["log_probability"], tails, strict=True)
        ]
        sections[size - 1 :] = ["\n".join([*sections[size - 1 :], *lines])]
        counts[size - 1 :] = [sum(counts[size - 1 :]) + len(lines)]
    head = "\\data\\\n" + "".join(f"ngram {size}={count}\n" for size, count in enumerate(counts, 1))
    body = "".join(f"\n\\{size}-grams:\n{section}\n" for size, section in enumerate(sections, 1))
    path.write_text(head + body + "\n\\end\\\n", encoding="utf-8")


class Peer:
    """KenLM with one model and the texts to score, in a process of its own."""

    def __init__(self, model: Path, texts: Path) -> None:
        script = str(ROOT / "benchmarks" / "peers" / "kenlm_scores.py")
        self._process = subprocess.Popen(
            [peers_python(), script, str(model), str(texts)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.perplexities = np.array(self._answer())

    def round(self) -> dict[str, float]:
        """Processor seconds from words and from text."""
        assert self._process.stdin is not None
        self._process.stdin.write("again\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("KenLM's process ended, see above: run `make env-peers`")
        return json.loads(line)


def _our_perplexities(model: NgramModel, texts: list[str]) -> np.ndarray:
    """In batches of what a task of Spark is given."""
    parts = [model.perplexities(texts[start : start + BATCH_TEXTS]) for start in range(0, len(texts), BATCH_TEXTS)]
    return np.concatenate(parts)


def _our_round(model: NgramModel, texts: list[str]) -> dict[str, float]:
    """Processor seconds from text, and without the splitting into words."""
    whole = _seconds(lambda: _our_perplexities(model, texts))
    splitting = _seconds(
        lambda: [split_words(texts[start : start + BATCH_TEXTS]) for start in range(0, len(texts), BATCH_TEXTS)]
    )
    return {"our_text": whole, "our_words": whole - splitting}


def _seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def _by_lmplz(texts: list[str], scored: Path, is_poor: np.ndarray, directory: Path) -> dict[str, float]:
    """Processor seconds of its trainer, from words, and how well its model judges."""
    lines = "\n".join(" ".join(words) for words in _words(texts))
    arpa = directory / "lmplz.arpa"
    command = ["lmplz", "-o", str(ORDER), "--prune", "0", *["1"] * (ORDER - 1), "-S", "1G", "--arpa", str(arpa)]
    before = _children_seconds()
    subprocess.run(command, input=lines, text=True, check=True, capture_output=True)
    seconds = _children_seconds() - before
    peer = Peer(arpa, scored)
    peer.close()
    area = area_under_curve(peer.perplexities[: len(is_poor)], is_poor)
    return {"build_seconds": round(seconds, 2), "area": round(area, 4)}


def _children_seconds() -> float:
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(WRITE_FLAG, action="store_true")
    parser.parse_args()
    if not DATA.is_dir():
        raise SystemExit(f"this benchmark needs {DATA}: put the shared data there")
    peers_python()  # before ours is measured
    articles, pages = _articles(), _rows(JUDGED)
    is_poor = np.array([page["label"] == 0 for page in pages])
    texts = [row["text"] for row in (*pages, *_rows(BOOKS))]
    build_seconds = _seconds(lambda: _built(articles))
    model = _built(articles)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        scored, arpa = directory / "scored.jsonl", directory / "ours.arpa"
        rows = [{"text": text, "words": " ".join(words)} for text, words in zip(texts, _words(texts), strict=True)]
        scored.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        _write_arpa(model, articles, arpa)
        peer = Peer(arpa, scored)
        ours = _our_perplexities(model, texts)
        speeds = [{**_our_round(model, texts), **peer.round()} for _ in range(ROUNDS)]
        peer.close()
        lmplz = _by_lmplz(articles, scored, is_poor, directory) if shutil.which("lmplz") else "not on the PATH"
    size = sum(len(text.encode()) for text in texts) / 1e6
    ratios = [each["text"] / each["our_text"] for each in speeds]
    report(
        "ngram_model",
        ours=size / statistics.median(each["our_text"] for each in speeds),
        peer=size / statistics.median(each["text"] for each in speeds),
        unit="MB of text per second of one core",
        ratio=round(statistics.median(ratios), 3),
        ratios=[round(ratio, 3) for ratio in ratios],
        ratio_from_words=round(statistics.median(each["words"] / each["our_words"] for each in speeds), 3),
        largest_difference=float(f"{np.abs(peer.perplexities / ours - 1).max():.2g}"),
        texts=len(texts),
        megabytes=round(size, 1),
        ngrams=len(model.rows),
        trained_megabytes=round(sum(len(text.encode()) for text in articles) / 1e6, 1),
        build_seconds=round(build_seconds, 2),
        area=round(area_under_curve(ours[: len(is_poor)], is_poor), 4),
        lmplz=lmplz,
    )


if __name__ == "__main__":
    main()
