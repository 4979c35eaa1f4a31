"""Reading web archives: pages per second of ours, from stored bytes to decoded text, beside datatrove's WarcReader on
the same files.

`python -m benchmarks.data.web_archives [--write]`. One process each, without Spark; seconds are those of the processor,
since other work on the machine must not count. benchmarks/data/archive_bodies.py compares the reading of bodies.
"""

from __future__ import annotations

import io
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.environment import peers_python
from benchmarks.results import report
from infra.code_digest import ROOT
from tasks.data.readers.source_bytes import HashingReader
from tasks.data.readers.web_archives import archive_pages

ARCHIVES = ROOT.parent / "shared" / "data" / "warc"
NAMES = ("dolma_sample-0000.warc.gz", "resiliparse_warcfile.warc.gz", "whirlwind.warc.gz")
COPIES, ROUNDS, MAX_RECORD_BYTES = 40, 3, 50_000_000
DATATROVE = """
import sys, time, json
from datatrove.pipeline.readers import WarcReader
def read():
    return sum(1 for _ in WarcReader(sys.argv[1], glob_pattern="*.warc.gz").run())
read_seconds = []
for _ in range(int(sys.argv[2])):
    started = time.process_time()
    pages = read()
    read_seconds.append(time.process_time() - started)
print(json.dumps({"pages": pages, "seconds": min(read_seconds)}))
"""


def main() -> None:
    """Measure and report."""
    if not ARCHIVES.is_dir():
        raise SystemExit(f"this benchmark needs {ARCHIVES}: put the shared data there")
    python = peers_python()
    data = b"".join((ARCHIVES / name).read_bytes() for name in NAMES) * COPIES
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "pages.warc.gz").write_bytes(data)
        command = [python, "-c", DATATROVE, directory, str(ROUNDS)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    theirs = json.loads(ran.stdout.strip().splitlines()[-1])
    pages, seconds = _fastest(
        lambda: sum(1 for page in archive_pages("x", HashingReader(io.BytesIO(data)), MAX_RECORD_BYTES) if page.text)
    )
    report(
        "web_archives",
        ours=pages / seconds,
        peer=theirs["pages"] / theirs["seconds"],
        unit="pages per second of one core",
        our_pages=pages,
        peer_pages=theirs["pages"],
        megabytes=round(len(data) / 1e6, 1),
        megabytes_per_second=round(len(data) / 1e6 / seconds, 1),
    )


def _fastest(read: Callable[[], int]) -> tuple[int, float]:
    number, best = 0, float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        number = read()
        best = min(best, time.process_time() - started)
    return number, best


if __name__ == "__main__":
    main()
