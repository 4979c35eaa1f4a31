"""The same pages as WARC files through our ingestion and extraction, and through datatrove: pages per second, processor
time of each.

Ours is measured with the Spark session up and one small file extracted before, as every later step of a run finds it.
Processor seconds are of all processes of either side, Java and the start of datatrove's included: what a busy machine
changes less than pages per second.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

from benchmarks.peers.environment import peers_python
from configs.load import load_scale
from configs.schema import SparkResources
from infra.code_digest import ROOT
from infra.machine.spark import stop_spark
from tasks.data.extraction.extract_documents import extract_documents
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tests.support.data_inputs import compute

NUM_FILES = 4
WORKERS = 2
WARM_UP_PAGES = 8
RESOURCES = SparkResources(
    master=f"local[{WORKERS}]", driver_memory="1g", executor_memory="1g", shuffle_partitions=NUM_FILES
)
LIMIT_SECONDS = 600
POLL_SECONDS = 0.2
RECIPE = load_scale("micro").data.recipe


def write_warc(pages: list[dict[str, Any]], path: Path) -> None:
    """One response record per page, a gzip member each, as crawls are stored."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for number, page in enumerate(pages):
            body = page["html"].encode()
            payload = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + body
            header = (
                f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: "
                f"<urn:uuid:00000000-0000-0000-0000-{number:012d}>\r\n"
                f"WARC-Date: 2026-01-01T00:00:00Z\r\nWARC-Identified-Payload-Type: text/html\r\nWARC-Target-URI: "
                f"https://example.org/{number}\r\n"
                f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(payload)}\r\n\r\n"
            )
            file.write(gzip.compress(header.encode() + payload + b"\r\n\r\n", mtime=0))


def warc_rates(pages: list[dict[str, Any]], directory: Path) -> dict[str, Any]:
    """Pages per second and processor seconds of ours and of datatrove, two workers each, and how many documents each
    gave."""
    for number in range(NUM_FILES):
        write_warc(pages[number::NUM_FILES], directory / "warc" / f"pages_{number}.warc.gz")
    write_warc(pages[:WARM_UP_PAGES], directory / "warm" / "pages.warc.gz")
    _ours(directory / "warm")
    with ProcessorTime() as ours:
        seconds, num_documents = _ours(directory / "warc")
    stop_spark()
    script = str(ROOT / "benchmarks" / "peers" / "extraction_datatrove.py")
    command = [peers_python(), script, str(directory / "warc"), str(directory / "datatrove"), str(WORKERS)]
    with ProcessorTime() as datatrove:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)
    processor = {"ours": ours.seconds, "datatrove": datatrove.seconds}
    theirs = json.loads(ran.stdout.strip().splitlines()[-1])
    rates = {"ours": len(pages) / seconds, "datatrove": len(pages) / theirs["seconds"]}
    return {
        **{name: round(rate, 1) for name, rate in rates.items()},
        "ratio": round(rates["ours"] / rates["datatrove"], 2),
        "our_documents": num_documents,
        "datatrove_documents": theirs["num_documents"],
        "pages": len(pages),
        "processor_seconds_per_1000_pages": {
            name: round(spent / len(pages) * 1000, 2) for name, spent in processor.items()
        },
        "processor_ratio": round(processor["datatrove"] / processor["ours"], 2),
    }


class ProcessorTime:
    """Counts the processor seconds of all that descends from this process while the block runs, also of what ends
    unwaited for.

    A process that ends between two looks keeps what the last one saw: up to POLL_SECONDS of each are not counted.
    """

    seconds = 0.0

    def __enter__(self) -> Self:
        self._ticks: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._look()
        self._first = dict(self._ticks)
        self._stop = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
        spent = sum(self._ticks.values()) - sum(self._first.values())
        self.seconds = spent / os.sysconf("SC_CLK_TCK")

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        ticks: dict[int, int] = {}
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # it ended since the list was made
                continue
            parents[int(path.parent.name)], ticks[int(path.parent.name)] = (
                int(fields[1]),
                int(fields[11]) + int(fields[12]),
            )
        family = {os.getpid(), *self._ticks}
        while children := {process for process, parent in parents.items() if parent in family} - family:
            family |= children
        self._ticks |= {process: ticks[process] for process in family if process in ticks}


def _ours(directory: Path) -> tuple[float, int]:
    ingest = RECIPE.ingest.model_copy(update={"max_source_bytes": 10**12})
    with tempfile.TemporaryDirectory() as root:
        sources = list_sources(directory)
        started = time.monotonic()
        records = compute(ingest_documents, Path(root), sources=sources, recipe=ingest, resources=RESOURCES)
        bounds = RECIPE.extract.model_copy(update={"max_document_chars": 1_000_000})
        extracted = compute(extract_documents, Path(root), records=records, recipe=bounds, resources=RESOURCES)
        return time.monotonic() - started, extracted.record.num_documents
