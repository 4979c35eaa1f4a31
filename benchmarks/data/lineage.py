"""Seconds of `glm46 lineage document`, by id and by URL, on a store of many documents: a directory or a bucket.

    python -m benchmarks.data.lineage [--documents 1000000] [--text-bytes 1024] [--store s3://bucket/prefix]
    [--keep DIRECTORY] [--write]

Random pages are ingested, extracted, deduplicated, filtered, split, cut into shards and trained on by toy steps with
the names, files and order of the real ones; each of the five keeps all texts. Every query is a process of its own, from
its start to its answer. A peer does not exist: only our own cost is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.inputs.lineage_store import Pages, fill_store, numbered_ids, url_of
from benchmarks.results import WRITE_FLAG, report
from infra.home import Home
from infra.storage.open_store import open_store

NUM_QUERIES = 5


def seconds_of(asked: str, home: Home, uri: str | None) -> float:
    """Of one command. Raises AssertionError where it does not find the phase."""
    options = [] if uri is None else ["--store", uri]
    command = [sys.executable, "-c", "from flows.cli.command import main; main()", "lineage", "document", asked]
    started = time.monotonic()
    done = subprocess.run(
        [*command, *options], env={**os.environ, "GLM46_HOME": str(home.root)}, capture_output=True, text=True
    )
    seconds = time.monotonic() - started
    assert "trained in sft" in done.stdout, done.stderr + done.stdout
    return seconds


def main() -> None:
    """Make the store and ask it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--text-bytes", type=int, default=1024, help="of each document, hardly compressible")
    parser.add_argument("--store", help="s3://bucket/prefix; by default a directory")
    parser.add_argument("--keep", type=Path, help="directory of the home, kept; without it a temporary one")
    parser.add_argument(WRITE_FLAG, action="store_true", help="also write benchmarks/results/lineage.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = (given.keep or Path(temporary)).absolute()
        (root / "parts").mkdir(parents=True)
        pages = Pages(directory=str(root / "parts"), num_documents=given.documents, text_bytes=given.text_bytes)
        pages.write()
        home = Home(root / "home")
        fill_store(open_store(given.store, home), pages)
        chosen = numbered_ids(given.documents)[:: -(-given.documents // NUM_QUERIES)]
        by_id = [seconds_of(identity, home, given.store) for identity, _ in chosen]
        by_url = [seconds_of(url_of(number), home, given.store) for _, number in chosen]
        num_bytes = sum(path.stat().st_size for path in (root / "parts").iterdir())
    report(
        "lineage",
        ours=statistics.median(by_id),
        peer=None,
        unit="seconds of a query by id",
        lower_is_better=True,
        seconds_by_url=round(statistics.median(by_url), 2),
        all_seconds={"id": [round(each, 2) for each in by_id], "url": [round(each, 2) for each in by_url]},
        num_documents=given.documents,
        bytes_of_texts_per_step=num_bytes,
        store=given.store or "directory",
    )


if __name__ == "__main__":
    main()
