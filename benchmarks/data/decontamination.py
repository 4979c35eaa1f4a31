"""Decontamination: evaluation items in disguise, hidden in clean pages, and clean text that must stay.

python -m benchmarks.data.decontamination [--write]   (../shared/data as in docs/data.md)

ITEMS_PER_FILE records of every public benchmark are quoted: the longest question, problem or answer of each, between
two pages of a book. A quotation counts as found if the document overlaps with any item. `long` are quotations of at
least near_quotes.MIN_WORDS words. `runs` is what runs of unchanged words find, without near_quotes. near_quotes was
developed on the disguises `developed`, on this data. Clean text: documents that overlap, and those that near_quotes
adds; mathematics is counted apart, since problem sets copy from each other. Intervals are 95 %, Wilson's.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.data.personal_data import interval
from benchmarks.inputs.quotation_disguises import DEVELOPED, UNSEEN
from benchmarks.results import report
from configs.load import load_scale
from infra.code_digest import ROOT
from tasks.data.decontamination.item_views import ASKED, CUED, views
from tasks.data.decontamination.near_quotes import MIN_WORDS
from tasks.data.decontamination.overlap import CHUNK_CHARS, MIN_WORDS_OF_TEXT, OverlapIndex
from tasks.data.decontamination.protected_items import index_items
from tasks.data.records.documents import JSON_RECORD
from tasks.data.text.text_chunks import chunk_bounds

DATA = ROOT.parent / "shared" / "data"
BENCHMARKS = (
    "bench/*",
    "math/gsm8k_test*",
    "math/math500*",
    "math/aime_2024*",
    "math/amc_2022_2023*",
    "math/mgsm*",
    "sft/mt_bench_questions*",
)
NO_BENCHMARKS = ("mbpp_train",)
PAGES = "text/gutenberg_en"
PROSE, MATHS, CODE = "prose", "mathematics", "code"
CLEAN = {
    PROSE: (
        PAGES,
        "multilingual/gutenberg_de_fr_es",
        "text/peps",
        "text/c4_sample",
        "text/wikipedia_plain_sample",
        "text/rust_book",
        "multilingual/react_docs",
        "quality/dclm_human_quality",
        "text/stack_exchange",
        "text/us_presidential_speeches",
        "text/movie_reviews",
        "text/openstax_python",
        "text/dolma_cc_en_head_sample",
    ),
    CODE: ("code/python_repos", "code/commit_patches"),
    MATHS: ("math/gsm8k_train", "math/math_with_solutions", "math/aime_1983_2023"),
}
TEXT_FIELDS = ("text", "content", "problem", "question", "message")
ITEMS_PER_FILE = 24
INDEXED_PER_FILE: int | None = None
"""All of them."""
SEED = 46


def records(num_per_file: int | None = None) -> list[dict[str, Any]]:
    """Evaluation records as ingestion leaves them, all or so many of each file, drawn."""
    paths = sorted(path for pattern in BENCHMARKS for path in DATA.glob(f"{pattern}.jsonl.gz"))
    documents = []
    for path in paths:
        if path.name.startswith(NO_BENCHMARKS):
            continue
        lines = gzip.decompress(path.read_bytes()).decode().strip().split("\n")
        chosen = (
            range(len(lines))
            if num_per_file is None
            else sorted(random.Random(SEED).sample(range(len(lines)), min(num_per_file, len(lines))))
        )
        documents += [
            {"id": f"{path.name} {at}", "source": path.name, "offset": at, "text": lines[at], "markup": JSON_RECORD}
            for at in chosen
        ]
    return documents


def quotations(given: Sequence[dict[str, Any]]) -> list[str]:
    """The longest text of each record that asks or answers; shorter ones than are protected are left out."""
    longest = (
        max((text for text, role in views(row["text"], row["markup"])[1] if role in (ASKED, CUED)), key=len, default="")
        for row in given
    )
    return [text for text in longest if len(text.split()) >= MIN_WORDS_OF_TEXT]


def texts_of(name: str) -> list[str]:
    """Documents of a file of clean text."""
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    field = next(field for field in TEXT_FIELDS if field in rows[0])
    return [row[field] for row in rows]


def overlapping(index: OverlapIndex, texts: Sequence[str]) -> np.ndarray:
    """Which texts overlap with any item."""
    bounds = chunk_bounds(map(len, texts), CHUNK_CHARS)
    return np.concatenate([index.first_hits(texts[start:stop]) for start, stop in bounds]) >= 0


def recall(index: OverlapIndex, quoted: Sequence[str], pages: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(disguise, shares of recognised quotations with intervals)."""
    is_long = np.array([len(text.split()) >= MIN_WORDS for text in quoted])
    for group, disguises in (("developed", DEVELOPED), ("unseen", UNSEEN)):
        for name, disguise in disguises.items():
            generator = random.Random(SEED)
            hidden = [
                f"{pages[2 * at % len(pages)]}\n\n{disguise(text, generator)}\n\n{pages[(2 * at + 1) % len(pages)]}"
                for at, text in enumerate(quoted)
            ]
            hits, by_runs = overlapping(index, hidden), overlapping(OverlapIndex(index.probes, ()), hidden)
            yield (
                name,
                {
                    "group": group,
                    "all": _share(hits),
                    "long": _share(hits[is_long]),
                    "runs": _share(by_runs),
                    "long_runs": _share(by_runs[is_long]),
                },
            )


def false_hits(index: OverlapIndex, kind: str) -> dict[str, Any]:
    """Documents of clean text that overlap, and those that only near_quotes says so of."""
    texts = [text for name in CLEAN[kind] for text in texts_of(name)]
    hits, by_runs = overlapping(index, texts), overlapping(OverlapIndex(index.probes, ()), texts)
    added = np.flatnonzero(hits & ~by_runs)
    for at in added[:5] if kind != MATHS else ():
        print("    " + " ".join(index.hits([texts[at]]).shared[0].split())[:200])
    return {"documents": len(texts), "found": _share(hits), "added": _share(hits & ~by_runs), "num_added": len(added)}


def _share(hits: np.ndarray) -> tuple[float, float, float]:
    """(share, its interval)."""
    return round(float(hits.mean()), 4), *interval(int(hits.sum()), len(hits))


def main() -> None:
    """Print both tables and the JSON line."""
    _, index = index_items(records(INDEXED_PER_FILE), (), load_scale("full").data.recipe.decontaminate)
    pages = texts_of(PAGES)
    pages = [page[:1500] for page, is_hit in zip(pages, overlapping(index, pages), strict=True) if not is_hit]
    quoted = quotations(records(ITEMS_PER_FILE))
    print(f"{len(quoted)} quotations", flush=True)
    recalls = {}
    for name, row in recall(index, quoted, pages):
        recalls[name] = row
        print(
            f"{row['group']:10s} {name:38s} all {row['all']} long {row['long']} runs only {row['runs']} long "
            f"{row['long_runs']}",
            flush=True,
        )
    clean = {}
    for kind in CLEAN:
        clean[kind] = false_hits(index, kind)
        print(f"clean {kind:12s} {clean[kind]}", flush=True)
    unseen = [row for row in recalls.values() if row["group"] == "unseen"]
    ours, runs = (sum(row[name][0] for row in unseen) / len(unseen) for name in ("long", "long_runs"))
    report(
        "decontamination",
        ours=ours,
        peer=runs,
        unit="recall of long items, mean of unseen disguises",
        peer_name="runs of 13 words",
        quotations=len(quoted),
        recall=recalls,
        clean=clean,
    )


if __name__ == "__main__":
    main()
