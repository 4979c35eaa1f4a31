"""Main content of web pages: ours beside every library tried, on pages with hand-marked articles and with marked segments.

python -m benchmarks.extraction [--write]   (after `make env-peers`; ../shared/data as in docs/data.md)

Each library runs over all pages once, one process, one core, timed in processor seconds; ours as well. F1 is over words as multisets,
averaged over the articles (precision and recall too); segment F1 over the segments that a page's text must and must not contain.
`halves`: F1 on the two halves of the articles by the hash of their ids; MIN_SHARE was chosen seeing the first. Then the pages as WARC
files through ingest_documents and extract_documents, and through datatrove's WarcReader and Trafilatura, two workers each.
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
from pathlib import Path
from typing import Any

from benchmarks.extraction_libraries import LIBRARIES
from benchmarks.extraction_warc import warc_rates
from benchmarks.results import report

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "html"
PEERS = ROOT / ".venv-peers" / "bin" / "python"
LIMIT_SECONDS = 300
IN_PEERS = ("boilerpy3 article", "boilerpy3 default", "goose3")
"""Not among the product's dependencies."""
OURS = "combined (ours)"
COPIES = 6
"""Times that the pages are put into the WARC files, so that what starting costs either side is a small part of a run."""

Page = dict[str, Any]


def token_f1(gold: str, found: str) -> tuple[float, float, float]:
    """(F1, precision, recall) over words as multisets."""
    wanted, given = (Counter(re.findall(r"\w+", text.lower())) for text in (gold, found))
    shared = (wanted & given).total()
    precision, recall = shared / max(given.total(), 1), shared / max(wanted.total(), 1)
    return 2 * shared / max(wanted.total() + given.total(), 1), precision, recall


def segment_f1(pages: list[Page], texts: list[str]) -> float:
    """F1 over segments: found ones that must be there against missed ones and found ones that must not."""
    found = missed = wrong = 0
    for page, text in zip(pages, (" ".join(text.split()) for text in texts), strict=True):
        inside = [" ".join(segment.split()) in text for segment in page["must_contain"]]
        found, missed = found + sum(inside), missed + len(inside) - sum(inside)
        wrong += sum(" ".join(segment.split()) in text for segment in page["must_not_contain"])
    return 2 * found / (2 * found + missed + wrong)


def _pages(name: str) -> list[Page]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _library_texts(pages: list[Page], directory: Path) -> dict[str, tuple[list[str], float]]:
    path = directory / "pages.jsonl"
    path.write_text("".join(json.dumps({"html": page["html"]}) + "\n" for page in pages), encoding="utf-8")
    results = {}
    for name in LIBRARIES:
        python = str(PEERS) if name in IN_PEERS else sys.executable
        command = [python, str(ROOT / "benchmarks" / "extraction_libraries.py"), str(path), name]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        if ran.returncode:
            raise ValueError(f"{name}: {ran.stderr[-500:]}: run `make env-peers`")
        line = json.loads(ran.stdout)
        results[name] = (line["texts"], line["seconds"])
    return results


def _our_texts(pages: list[Page]) -> tuple[list[str], float]:
    from tasks.data.html_text import html_to_text

    html_to_text(pages[0]["html"], "combined")
    started = time.process_time()
    texts = [html_to_text(page["html"], "combined")[0] for page in pages]
    return texts, time.process_time() - started


def _table(articles: list[Page], marked: list[Page], results: dict[str, tuple[list[str], float]]) -> dict[str, dict[str, float]]:
    table = {}
    for name, (texts, seconds) in results.items():
        scores = [token_f1(page["article_body"], text) for page, text in zip(articles, texts, strict=False)]
        f1, precision, recall = (sum(score[place] for score in scores) / len(scores) for place in range(3))
        table[name] = {
            "f1": round(f1, 4), "precision": round(precision, 4), "recall": round(recall, 4),
            "segment_f1": round(segment_f1(marked, texts[len(articles) :]), 4), "pages_per_second": round(len(texts) / seconds, 1),
        }  # fmt: skip
        print(f"{name:26s} " + "  ".join(f"{key} {value:.4f}" for key, value in table[name].items()), flush=True)
    return table


def _halves(articles: list[Page], texts: list[str]) -> tuple[float, float]:
    scores: tuple[list[float], list[float]] = ([], [])
    for page, text in zip(articles, texts, strict=False):
        half = int(hashlib.sha256(page["id"].encode()).hexdigest(), 16) % 2
        scores[half].append(token_f1(page["article_body"], text)[0])
    return round(sum(scores[0]) / len(scores[0]), 4), round(sum(scores[1]) / len(scores[1]), 4)


def main() -> None:
    """Print the table and the JSON line."""
    articles, marked = _pages("article_extraction"), _pages("extraction_segments")
    with tempfile.TemporaryDirectory() as directory:
        results = _library_texts([*articles, *marked], Path(directory))
        results[OURS] = _our_texts([*articles, *marked])
        table = _table(articles, marked, results)
        rates = warc_rates([*articles, *marked] * COPIES, Path(directory), PEERS)
    libraries = {name: row for name, row in table.items() if name != OURS}
    best = max(libraries, key=lambda name: libraries[name]["f1"])
    report(
        "extraction", ours=table[OURS]["f1"], peer=table[best]["f1"], unit="token F1, 78 articles", peer_name=best,
        halves={name: _halves(articles, results[name][0]) for name in (OURS, best)}, warc=rates, table=table,
    )  # fmt: skip


if __name__ == "__main__":
    main()
