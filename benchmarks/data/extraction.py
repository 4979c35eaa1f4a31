"""Main content of web pages: ours beside every library tried, on pages with hand-marked articles and with marked
segments.

python -m benchmarks.data.extraction [--write]   (after `make env-peers`; ../shared/data as in docs/data.md)

Each library runs over all pages once, one process, one core, timed in processor seconds; ours as well. F1 is over words
as multisets, averaged over the articles (precision and recall too); segment F1 over the segments that a page's text
must and must not contain. Intervals are 95 %, by bootstrap over pages; `differences` are ours minus the library's on
the same pages. These pages are those on which html_text.py was developed: MIN_SHARE on half of the articles (`halves`:
F1 by the hash of their ids), MIN_CONFIRMED_SHARE and MIN_AGREEMENT on all of them and on 1,495 pages of another public
set. Then the pages as WARC files through ingest_documents and extract_documents, and through datatrove's WarcReader and
Trafilatura, two workers each.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.data.extraction_warc import warc_rates
from benchmarks.peers.environment import peers_python
from benchmarks.peers.extraction_libraries import LIBRARIES
from benchmarks.results import report
from infra.code_digest import ROOT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

DATA = ROOT.parent / "shared" / "data" / "html"
LIMIT_SECONDS = 300
IN_PEERS = ("boilerpy3 article", "boilerpy3 default", "goose3")
"""Not among the product's dependencies."""
OURS = "combined (ours)"
COPIES = 6
"""Times that the pages are put into the WARC files, so that what starting costs either side is a small part of a
run."""

NUM_SAMPLES = 2000
SEED = 46

Page = dict[str, Any]


def token_f1(gold: str, extracted: str) -> tuple[float, float, float]:
    """(F1, precision, recall) over words as multisets."""
    wanted, given = (Counter(re.findall(r"\w+", text.lower())) for text in (gold, extracted))
    shared = (wanted & given).total()
    precision, recall = shared / max(given.total(), 1), shared / max(wanted.total(), 1)
    return 2 * shared / max(wanted.total() + given.total(), 1), precision, recall


def segment_counts(page: Page, text: str) -> tuple[int, int, int]:
    """Segments of a page that must be in its text and are, that must be and are not, and that must not be and are."""
    plain = " ".join(text.split())
    inside = [" ".join(segment.split()) in plain for segment in page["must_contain"]]
    return (
        sum(inside),
        len(inside) - sum(inside),
        sum(" ".join(segment.split()) in plain for segment in page["must_not_contain"]),
    )


def segment_f1(counts: FloatArray) -> FloatArray:
    """F1 over segments: (..., pages, 3) -> (...)."""
    common, missed, wrong = np.moveaxis(counts.sum(axis=-2), -1, 0)
    return 2 * common / (2 * common + missed + wrong)


def _mean(scores: FloatArray) -> FloatArray:
    return scores.mean(axis=(-2, -1))


def interval(
    measure: Callable[[FloatArray], FloatArray], ours: FloatArray, other: FloatArray | None = None
) -> tuple[float, float]:
    """95 % of a measure over pages (pages, columns), or of ours minus another's on the same pages."""
    drawn = np.random.default_rng(SEED).integers(0, len(ours), (NUM_SAMPLES, len(ours)))
    values = measure(ours[drawn]) - (0 if other is None else measure(other[drawn]))
    low, high = np.percentile(values, [2.5, 97.5])
    return round(float(low), 4), round(float(high), 4)


def _pages(name: str) -> list[Page]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _library_texts(pages: list[Page], directory: Path) -> dict[str, tuple[list[str], float]]:
    path = directory / "pages.jsonl"
    path.write_text("".join(json.dumps({"html": page["html"]}) + "\n" for page in pages), encoding="utf-8")
    results = {}
    for name in LIBRARIES:
        python = peers_python() if name in IN_PEERS else sys.executable
        command = [python, str(ROOT / "benchmarks" / "peers" / "extraction_libraries.py"), str(path), name]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        if ran.returncode:
            raise ValueError(f"{name}: {ran.stderr[-500:]}: run `make env-peers`")
        line = json.loads(ran.stdout)
        results[name] = (line["texts"], line["seconds"])
    return results


def _our_texts(pages: list[Page]) -> tuple[list[str], float]:
    from tasks.data.extraction.html_text import html_to_text

    html_to_text(pages[0]["html"], "combined")
    started = time.process_time()
    texts = [html_to_text(page["html"], "combined")[0] for page in pages]
    return texts, time.process_time() - started


def _table(
    articles: list[Page], marked: list[Page], results: dict[str, tuple[list[str], float]]
) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    pages: dict[str, tuple[FloatArray, FloatArray]] = {}
    for name, (texts, seconds) in results.items():
        scores = np.array([token_f1(page["article_body"], text) for page, text in zip(articles, texts, strict=False)])
        counts = np.array(
            [segment_counts(page, text) for page, text in zip(marked, texts[len(articles) :], strict=True)], dtype=float
        )
        pages[name] = scores[:, :1], counts
        f1, precision, recall = scores.mean(axis=0).round(4).tolist()
        table[name] = {
            "f1": f1,
            "f1_interval": interval(_mean, scores[:, :1]),
            "precision": precision,
            "recall": recall,
            "segment_f1": round(float(segment_f1(counts)), 4),
            "segment_f1_interval": interval(segment_f1, counts),
            "pages_per_second": round(len(texts) / seconds, 1),
        }
    for name, row in table.items():
        row["differences"] = [
            interval(measure, pages[OURS][at], pages[name][at]) for at, measure in enumerate((_mean, segment_f1))
        ]
        print(f"{name:26s} " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return table


def _halves(articles: list[Page], texts: list[str]) -> tuple[float, float]:
    scores: tuple[list[float], list[float]] = ([], [])
    for page, text in zip(articles, texts, strict=False):
        half = int(hashlib.sha256(page["id"].encode()).hexdigest(), 16) % 2
        scores[half].append(token_f1(page["article_body"], text)[0])
    return round(sum(scores[0]) / len(scores[0]), 4), round(sum(scores[1]) / len(scores[1]), 4)


def main() -> None:
    """Print the table and the JSON line."""
    peers_python()  # before ours is measured
    articles, marked = _pages("article_extraction"), _pages("extraction_segments")
    with tempfile.TemporaryDirectory() as directory:
        results = _library_texts([*articles, *marked], Path(directory))
        results[OURS] = _our_texts([*articles, *marked])
        table = _table(articles, marked, results)
        rates = warc_rates([*articles, *marked] * COPIES, Path(directory))
    libraries = {name: row for name, row in table.items() if name != OURS}
    best = max(libraries, key=lambda name: libraries[name]["f1"])
    report(
        "extraction",
        ours=table[OURS]["f1"],
        peer=table[best]["f1"],
        unit="token F1, 78 articles",
        peer_name=best,
        halves={name: _halves(articles, results[name][0]) for name in (OURS, best)},
        warc=rates,
        table=table,
    )


if __name__ == "__main__":
    main()
