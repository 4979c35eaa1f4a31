"""Reading web archives up to the decoded body: ours beside FastWARC, which resiliparse brings.

`python -m benchmarks.data.archive_bodies [--write]`   (../shared/data as in docs/data.md)

Both read every record of one file, parse the HTTP of responses and undo their codings, on one core, in turn, round by
round, in processor seconds. The bodies of all responses must be the same bytes at the same places. Ours also hashes
the file, bounds each record and looks for damages. `damages` says how many whole pages of six in a damaged archive each
gives, and how many damaged bodies it gives as if they were whole.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from fastwarc.warc import ArchiveIterator, WarcRecordType

from benchmarks.inputs.damaged_archives import BODY, URLS, damaged_archives
from benchmarks.results import WRITE_FLAG, report
from infra.code_digest import ROOT
from tasks.data.readers.archive_records import archive_records
from tasks.data.readers.http_payloads import PayloadError, decode_body, parse_response
from tasks.data.readers.source_bytes import HashingReader
from tasks.data.readers.web_archives import archive_pages

ARCHIVES = ROOT.parent / "shared" / "data" / "warc"
NAMES = ("dolma_sample-0000.warc.gz", "resiliparse_warcfile.warc.gz", "whirlwind.warc.gz")
COPIES, ROUNDS, MAX_RECORD_BYTES = 150, 5, 50_000_000


def _our_bodies(path: Path) -> Iterator[tuple[int, bytes]]:
    """(place, body) of every response."""
    with open(path, "rb") as file:
        for record in archive_records(path.name, HashingReader(file), MAX_RECORD_BYTES):
            if record.headers.get(b"warc-type") == b"response" and not record.reason:
                try:
                    response = parse_response(record.block)
                    yield (
                        record.member,
                        decode_body(response, MAX_RECORD_BYTES, is_cut=b"warc-truncated" in record.headers),
                    )
                except PayloadError:
                    continue


def _their_bodies(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        for record in ArchiveIterator(file, auto_decode="all"):
            body = record.reader.read()
            if record.record_type == WarcRecordType.response and record.is_http:
                yield record.stream_pos, body


def _seconds(bodies: Callable[[Path], Iterator[tuple[int, bytes]]], path: Path) -> float:
    started = time.process_time()
    for _ in bodies(path):
        pass
    return time.process_time() - started


def _our_pages(data: bytes) -> Iterator[tuple[str, str]]:
    for page in archive_pages("x", HashingReader(io.BytesIO(data)), MAX_RECORD_BYTES):
        if not page.reason:
            yield page.url, page.text


def _their_pages(data: bytes) -> Iterator[tuple[str, str]]:
    try:
        for record in ArchiveIterator(io.BytesIO(data), auto_decode="all"):
            body = record.reader.read()
            if record.http_headers is not None and record.http_headers.status_code == 200:
                yield record.headers["WARC-Target-URI"], body.decode("utf-8", "replace")
    except OSError:
        return  # nothing after it can be read


def _damages() -> dict[str, dict[str, int]]:
    whole = {url: BODY.format(url) for url in URLS}
    found: dict[str, dict[str, int]] = {}
    for damage, (data, num_whole) in damaged_archives().items():
        ours, theirs = list(_our_pages(data)), list(_their_pages(data))
        found[damage] = {
            "whole": num_whole,
            "ours": sum(whole[url] == text for url, text in ours),
            "fastwarc": sum(whole[url] == text for url, text in theirs),
            "ours_wrong": sum(whole[url] != text for url, text in ours),
            "fastwarc_wrong": sum(whole[url] != text for url, text in theirs),
        }
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(WRITE_FLAG, action="store_true")
    parser.parse_args()
    if not ARCHIVES.is_dir():
        raise SystemExit(f"this benchmark needs {ARCHIVES}: put the shared data there")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pages.warc.gz"
        path.write_bytes(b"".join((ARCHIVES / name).read_bytes() for name in NAMES) * COPIES)
        megabytes = path.stat().st_size / 1e6
        num_bodies = 0
        for ours, theirs in zip(_our_bodies(path), _their_bodies(path), strict=True):
            assert ours == theirs, f"the bodies at {ours[0]} and {theirs[0]} differ"
            num_bodies += 1
        seconds = [(_seconds(_our_bodies, path), _seconds(_their_bodies, path)) for _ in range(ROUNDS)]
    ratios = [theirs / ours for ours, theirs in seconds]
    report(
        "archive_bodies",
        ours=megabytes / statistics.median(ours for ours, _ in seconds),
        peer=megabytes / statistics.median(theirs for _, theirs in seconds),
        unit="stored MB per second of one core",
        ratio=round(statistics.median(ratios), 3),
        ratios=[round(ratio, 3) for ratio in ratios],
        megabytes=round(megabytes, 1),
        equal_bodies=num_bodies,
        damages=_damages(),
        fastwarc=version("fastwarc"),
    )


if __name__ == "__main__":
    main()
