"""The heuristic filter beside datatrove's, on one core: python -m benchmarks.filters [--write]

Ours measures Gopher, C4 and FineWeb in one pass; the peer runs its Gopher and FineWeb filters one after the other (its C4 filter edits
lines, and is left out). Both in CPU seconds, in turn, on English text: Python's topics, and the shared pages and articles where they lie
beside the checkout. Where both have a rule of the same definition, the share of documents that they decide alike is reported.
"""

from __future__ import annotations

import gzip
import json
import pydoc_data.topics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.results import report
from tasks.data.heuristics import measure
from tests.conftest import ROOT
from tests.data_inputs import SHARED_DATA

PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
MAX_CHARS, DOCUMENT_CHARS = 600_000, 6000
BATCH_DOCUMENTS = 60
NUM_ROUNDS = 2


def english_texts() -> list[str]:
    """Documents of at most DOCUMENT_CHARS, cut at paragraph ends."""
    texts: list[str] = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    for path in sorted(SHARED_DATA.glob("html/*.jsonl.gz")) + sorted(SHARED_DATA.glob("dedup/*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
        texts += [record["text"] for record in records if isinstance(record.get("text"), str)]
    found, num_chars = [], 0
    for text in texts:
        piece = text[:DOCUMENT_CHARS].rpartition("\n\n")[0] or text[:DOCUMENT_CHARS]
        if len(piece) > 200 and num_chars < MAX_CHARS:
            found.append(piece)
            num_chars += len(piece)
    return found


def run_ours(texts: list[str]) -> tuple[dict[str, np.ndarray], float]:
    """All measures, and CPU seconds."""
    started = time.process_time()
    parts = [measure(texts[start : start + BATCH_DOCUMENTS], ["en"] * len(texts[start : start + BATCH_DOCUMENTS]))
             for start in range(0, len(texts), BATCH_DOCUMENTS)]  # fmt: skip
    seconds = time.process_time() - started
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, seconds


def run_peer(texts: list[str]) -> dict[str, dict]:
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(texts, file)
        file.flush()
        script = Path(__file__).with_name("filters_datatrove.py")
        done = subprocess.run([PEER_PYTHON, script, file.name], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def agreement(found: dict[str, np.ndarray], reasons: dict[str, list[str]]) -> dict[str, float]:
    """Share of documents decided alike by rules of one definition; the peer shows a rule only where no earlier one of its filter fired."""
    repetition, fineweb, quality = (np.array(reasons[name]) for name in ("gopher_repetition", "fineweb", "gopher_quality"))
    lines = found["repeated_line_share"] > 0.3
    pairs = {
        "repeated_lines": (lines, repetition == "dup_line_frac"),
        "too_few_words": (found["num_words"] < 50, quality == "gopher_short_doc"),
        "unterminated_lines": (found["terminated_line_share"] <= 0.12, fineweb == "line_punct_ratio"),
    }
    return {name: round(float((ours == peer).mean()), 4) for name, (ours, peer) in pairs.items() if len(ours)}


def main() -> None:
    texts = english_texts()
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    run_ours(texts[:BATCH_DOCUMENTS])
    rounds = []
    for _ in range(NUM_ROUNDS):
        found, ours = run_ours(texts)
        peer = run_peer(texts)
        rounds.append((ours, sum(peer["seconds"].values())))
        print(f"ours {ours:.2f} s, datatrove {rounds[-1][1]:.2f} s of CPU for {megabytes:.1f} MB", flush=True)
    ours, other = (min(seconds) for seconds in zip(*rounds, strict=True))
    report(
        "filters", ours=megabytes / ours, peer=megabytes / other, unit="MB of text per CPU second", num_documents=len(texts),
        megabytes=round(megabytes, 2), agreement=agreement(found, peer["reasons"]), peer_seconds_by_filter=peer["seconds"],
        peer_distribution="datatrove 0.10.1",
    )  # fmt: skip


if __name__ == "__main__":
    main()
