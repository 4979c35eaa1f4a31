"""The heuristic filter beside datatrove's, on one core: python -m benchmarks.data.filters [--write]

Time: ours finds the prose and judges it by all rules of Gopher, C4 and FineWeb in one pass; the peer runs its Gopher
and FineWeb filters one after the other (its C4 filter edits lines, and is left out). Both in CPU seconds, in turn, on
English text: the topics of Python, and the shared pages and articles where they are next to the checkout. Where both
have a rule of one definition, the share of documents that they decide alike is reported. Quality, where ../shared/data
is: the share of documents that either keeps at full.yaml's bounds, of sets that people wrote or edited and of pages
that people judged; those sets were looked at while the rules were made. The peer has its defaults, which are for
English web pages.
"""

from __future__ import annotations

import gzip
import json
import pydoc_data.topics
import random
import subprocess
import tempfile
import time

import numpy as np

from benchmarks.peers.environment import peers_python
from benchmarks.results import report
from configs.load import load_scale
from infra.code_digest import ROOT
from tasks.data.filtering.heuristics import flat_bounds, measure, name_reasons
from tasks.data.scoring.language_id import identify_languages
from tasks.data.text.prose_text import prose_of
from tests.support.data_inputs import SHARED_DATA

MAX_CHARS, DOCUMENT_CHARS = 600_000, 6000
BATCH_DOCUMENTS = 60
NUM_ROUNDS = 2
SETS = {
    # file: fields of the text, domain
    "text/peps": ("text", "web"),
    "text/rust_book": ("text", "web"),
    "text/openstax_python": ("text", "web"),
    "text/stack_exchange": ("text", "web"),
    "text/wikipedia_plain_sample": ("text", "web"),
    "text/gutenberg_en": ("text", "web"),
    "text/us_presidential_speeches": ("text", "web"),
    "text/c4_sample": ("text", "web"),
    "text/movie_reviews": ("text", "web"),
    "multilingual/gutenberg_de_fr_es": ("text", "multilingual"),
    "multilingual/react_docs": ("text", "multilingual"),
    "multilingual/art_of_command_line": ("text", "multilingual"),
    "math/math_with_solutions": ("problem solution", "math"),
    "math/math500": ("problem solution", "math"),
    "math/aime_1983_2023": ("problem solution", "math"),
    "math/gsm8k_train": ("question answer", "math"),
    "code/python_repos": ("content", "code"),
}
MAX_SET_DOCUMENTS = 300
JUDGED = "quality/dclm_human_quality"
NUM_DRAWS = 2000


def english_texts() -> list[str]:
    """Documents of at most DOCUMENT_CHARS, cut at paragraph ends."""
    texts: list[str] = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    for path in sorted(SHARED_DATA.glob("html/*.jsonl.gz")) + sorted(SHARED_DATA.glob("dedup/*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
        texts += [record["text"] for record in records if isinstance(record.get("text"), str)]
    pieces, num_chars = [], 0
    for text in texts:
        piece = text[:DOCUMENT_CHARS].rpartition("\n\n")[0] or text[:DOCUMENT_CHARS]
        if len(piece) > 200 and num_chars < MAX_CHARS:
            pieces.append(piece)
            num_chars += len(piece)
    return pieces


def run_ours(texts: list[str]) -> tuple[dict[str, np.ndarray], float]:
    """All measures, and the CPU seconds of finding reasons."""
    bounds = flat_bounds(load_scale("full").data.recipe.filter.heuristics)
    batches = [texts[start : start + BATCH_DOCUMENTS] for start in range(0, len(texts), BATCH_DOCUMENTS)]
    started = time.process_time()
    for batch in batches:
        name_reasons(batch, ["en"] * len(batch), ["web"] * len(batch), bounds)
    seconds = time.process_time() - started
    parts = [measure([prose_of(text).text for text in batch], ["en"] * len(batch)) for batch in batches]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, seconds


def records_of(name: str) -> list[dict]:
    with gzip.open(SHARED_DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def is_kept(texts: list[str], domain: str) -> tuple[np.ndarray, np.ndarray]:
    """By ours at full.yaml's bounds, and by the peer."""
    bounds = flat_bounds(load_scale("full").data.recipe.filter.heuristics)
    languages, _ = identify_languages([prose_of(text).natural for text in texts], 2000, "")
    reasons: list[str] = []
    for start in range(0, len(texts), BATCH_DOCUMENTS):
        batch = slice(start, start + BATCH_DOCUMENTS)
        reasons += name_reasons(texts[batch], languages[batch], [domain] * len(texts[batch]), bounds)
    peer = run_peer(texts)["reasons"].values()
    return np.array([not reason for reason in reasons]), np.array([not any(rules) for rules in zip(*peer, strict=True)])


def kept_shares() -> dict[str, dict[str, float]]:
    """By set: documents, and the share of them that either keeps."""
    shares = {}
    for name, (fields, domain) in SETS.items():
        records = records_of(name)
        chosen = random.Random(46).sample(records, min(MAX_SET_DOCUMENTS, len(records)))
        ours, peer = is_kept(["\n\n".join(record[field] for field in fields.split()) for record in chosen], domain)
        shares[name] = {
            "documents": len(chosen),
            "ours": round(float(ours.mean()), 3),
            "peer": round(float(peer.mean()), 3),
        }
        print(f"{name}: {shares[name]}", flush=True)
    return shares


def judged_pages() -> dict[str, dict[str, object]]:
    """Shares kept of the pages judged good and poor, and half the sum of good kept and poor dropped with its interval
    of 95 %."""
    records = records_of(JUDGED)
    is_good = np.array([str(record["label"]) == "1" for record in records])
    draws = np.random.Generator(np.random.Philox(46)).integers(0, len(records), (NUM_DRAWS, len(records)))
    shares = {}
    for name, kept in zip(("ours", "peer"), is_kept([record["text"] for record in records], "web"), strict=True):
        balanced = [(kept[draw][is_good[draw]].mean() + 1 - kept[draw][~is_good[draw]].mean()) / 2 for draw in draws]
        good, poor = float(kept[is_good].mean()), float(kept[~is_good].mean())
        interval = [round(float(np.quantile(balanced, share)), 3) for share in (0.025, 0.975)]
        shares[name] = {
            "good": round(good, 3),
            "poor": round(poor, 3),
            "balanced": round((good + 1 - poor) / 2, 3),
            "interval": interval,
        }
    return shares


def run_peer(texts: list[str]) -> dict[str, dict]:
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(texts, file)
        file.flush()
        script = ROOT / "benchmarks" / "peers" / "filters_datatrove.py"
        done = subprocess.run([peers_python(), script, file.name], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def agreement(measures: dict[str, np.ndarray], reasons: dict[str, list[str]]) -> dict[str, float]:
    """Share of documents decided alike by rules of one definition; the peer shows a rule only where no earlier one of
    its filter fired."""
    repetition, fineweb, quality = (
        np.array(reasons[name]) for name in ("gopher_repetition", "fineweb", "gopher_quality")
    )
    lines = measures["repeated_line_share"] > 0.3
    pairs = {
        "repeated_lines": (lines, repetition == "dup_line_frac"),
        "too_few_words": (measures["num_words"] < 50, quality == "gopher_short_doc"),
        "unterminated_lines": (measures["terminated_line_share"] <= 0.12, fineweb == "line_punct_ratio"),
    }
    return {name: round(float((ours == peer).mean()), 4) for name, (ours, peer) in pairs.items() if len(ours)}


def main() -> None:
    peers_python()  # before ours is measured
    texts = english_texts()
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    run_ours(texts[:BATCH_DOCUMENTS])
    rounds = []
    for _ in range(NUM_ROUNDS):
        measures, ours = run_ours(texts)
        peer = run_peer(texts)
        rounds.append((ours, sum(peer["seconds"].values())))
        print(f"ours {ours:.2f} s, datatrove {rounds[-1][1]:.2f} s of CPU for {megabytes:.1f} MB", flush=True)
    ours, other = (min(seconds) for seconds in zip(*rounds, strict=True))
    report(
        "filters",
        ours=megabytes / ours,
        peer=megabytes / other,
        unit="MB of text per CPU second",
        num_documents=len(texts),
        megabytes=round(megabytes, 2),
        agreement=agreement(measures, peer["reasons"]),
        peer_seconds_by_filter=peer["seconds"],
        peer_distribution="datatrove 0.10.1",
        kept=kept_shares() if SHARED_DATA.exists() else {},
        judged_pages=judged_pages() if SHARED_DATA.exists() else {},
    )


if __name__ == "__main__":
    main()
