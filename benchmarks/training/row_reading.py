"""How long ranks wait for their rows, from a bucket and from a directory, beside copying the shards whole first.

    python -m benchmarks.training.row_reading [--shards 1000] [--steps 20] [--step-seconds 2] [--write]

A phase reads documents of all shards in random order, as packing draws them. Ranks are processes without a model: they
read a step's rows ahead, as training does, and sleep for `--step-seconds` in place of the step. The bucket is a server
on this machine that waits before every answer and sends at most `--mb-per-second` in all. Rows of the table:

- bucket: the node's cache is empty. bucket again: the same steps, as after a restart, with the cache of the first run.
- directory: files of the same machine, mapped into memory, their blocks verified at first use.
- copied first: one process fetches and hashes every shard before the ranks start, and each rank reads every index.

`open_s` is until the rows are open, `first_rows_s` until the first step has its rows, counted from the same moment;
`stall` is the share of the steps' time after the first that ranks wait. `fetched_mb` and `requests` are those of the
server, `used_mb` the tokens of the rows. `anonymous_mib` is the memory of a rank at its end that is not a mapped
file, `peak_mib` the largest with mapped files.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.inputs.throttled_s3 import BUCKET, Counts, throttled_s3
from benchmarks.results import report
from configs.files.block_cache import BlockCache
from configs.files.block_reader import BlockReader
from configs.files.file_digests import FileDigests, digests_of
from configs.files.s3_objects import download
from configs.files.stored_files import StoredFile
from tasks.data.packing.packed_order import part_name, write_part
from tasks.data.packing.packed_rows import PACKING_FILE, PackedRows
from tasks.data.shards.token_shard import index_bytes, open_shard, token_dtype
from tasks.training.loop.prefetch import Prefetcher

VOCAB_SIZE, ROW_TOKENS = 151_552, 4096
DOCUMENT_TOKENS = (200, 2000)
"""Shortest and longest document."""
CACHE_BYTES = 10**12
MB = 1e6

Row = dict[str, float]


def main() -> None:
    """All four ways, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--shard-tokens", type=int, default=1_500_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="rows of a rank in a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=2.0)
    parser.add_argument("--wait-ms", type=float, default=20.0, help="before every answer of the server")
    parser.add_argument("--mb-per-second", type=float, default=200.0, help="of the server, in all")
    parser.add_argument("--write", action="store_true", help="store the record in benchmarks/results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "store"
        local = write_inputs(root, given.shards, given.shard_tokens)
        remote = [replace(file, uri=file.uri.replace(str(root), f"s3://{BUCKET}")) for file in local]
        with throttled_s3(root, given.wait_ms / 1000, given.mb_per_second * MB) as counts:
            ranks = partial(on_ranks, given, counts, Path(directory) / "node")
            ways: dict[str, Callable[[], Row]] = {
                "bucket": partial(ranks, remote),
                "bucket again": partial(ranks, remote),
                "directory": partial(ranks, local),
                "copied first": partial(copied_first, remote, Path(directory) / "copies", counts, ranks),
            }
            table = {}
            for name, way in ways.items():
                table[name] = way()
                print(f"{name}: {table[name]}", flush=True)
    report(
        "row_reading",
        ours=table["bucket"]["first_rows_s"],
        peer=table["copied first"]["first_rows_s"],
        unit="s until the first step has its rows, shards in a bucket",
        lower_is_better=True,
        settings={name: value for name, value in vars(given).items() if name != "write"},
        table=table,
    )


def write_inputs(root: Path, num_shards: int, num_tokens: int) -> list[StoredFile]:
    """Shards of random tokens, and a phase that reads each of their documents once, in random order."""
    draw, dtype = np.random.default_rng(46), token_dtype(VOCAB_SIZE)
    files, pieces = [], []
    root.mkdir(parents=True)
    for number in range(num_shards):
        lengths = draw.integers(*DOCUMENT_TOKENS, max(1, num_tokens * 2 // sum(DOCUMENT_TOKENS)))
        data = draw.integers(0, VOCAB_SIZE, lengths.sum(), dtype=np.int32).astype(dtype).tobytes()
        files.append(_stored(f"{root}/web-{number:05d}.bin", data))
        files.append(_stored(f"{root}/web-{number:05d}.idx", index_bytes(lengths, dtype)))
        sequences = np.arange(len(lengths))
        pieces.append(np.column_stack([np.full_like(sequences, number), sequences, np.zeros_like(sequences), lengths]))
    order = draw.permutation(np.concatenate(pieces))
    order = np.column_stack([order, np.cumsum(order[:, 3]) - order[:, 3], np.arange(len(order))]).astype(np.int64)
    part = write_part(root / part_name(0), order)
    names = [f"web-{number:05d}" for number in range(num_shards)]
    packing = {"packing": "stream", "sequence_length": ROW_TOKENS, "seed": 46, "shards": names, "has_glue": False}
    packing["parts"] = [part]
    files.append(_stored(f"{root}/{part_name(0)}", (root / part_name(0)).read_bytes()))
    files.append(_stored(f"{root}/{PACKING_FILE}", json.dumps(packing).encode()))
    return files


def _stored(path: str, data: bytes) -> StoredFile:
    Path(path).write_bytes(data)
    digests = FileDigests()
    digests.update(data)
    return StoredFile(path, digests.size, digests.sha256, digests.blocks)


def on_ranks(
    given: argparse.Namespace, counts: Counts, cache_dir: Path, files: list[StoredFile], reads_indexes: bool = False
) -> Row:
    """The slowest rank, and what all of them requested."""
    counts.take()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.ranks, mp_context=context) as processes:
        rows = list(
            processes.map(partial(read_steps, given, files, cache_dir, reads_indexes), range(given.ranks), timeout=3600)
        )
    requests, num_bytes = counts.take()
    used = given.ranks * (given.steps + 1) * given.rows * ROW_TOKENS * token_dtype(VOCAB_SIZE).itemsize
    return {
        **{name: round(max(row[name] for row in rows), 3) for name in rows[0]},
        "requests": requests,
        "fetched_mb": round(num_bytes / MB, 1),
        "used_mb": round(used / MB, 1),
    }


def read_steps(
    given: argparse.Namespace, files: list[StoredFile], cache_dir: Path, reads_indexes: bool, rank: int
) -> Row:
    """One rank: its seconds and its memory. The phase's rows are shuffled, so that a step's are anywhere in it."""
    own = [file for file in files if file.name in (part_name(0), PACKING_FILE)]
    started = time.monotonic()
    if reads_indexes:
        indexes = [open_shard(Path(file.uri)) for file in files if file.name.endswith(".bin")]
    rows = PackedRows(own, [file for file in files if file not in own], BlockReader(BlockCache(cache_dir, CACHE_BYTES)))
    opened = time.monotonic()

    def load(step: int) -> tuple[np.ndarray, ...]:
        first = (step * given.ranks + rank) * given.rows
        return rows.rows(first, first + given.rows)

    ahead = Prefetcher(load, lambda step: step + 1 if step < given.steps else None)
    ahead.read(0)
    begun, waited = time.monotonic(), 0.0
    for step in range(1, given.steps + 1):
        time.sleep(given.step_seconds)
        asked = time.monotonic()
        ahead.read(step)
        waited += time.monotonic() - asked
    ended = time.monotonic()
    ahead.close()
    memory = {"anonymous_mib": _memory_mib("RssAnon"), "peak_mib": _memory_mib("VmHWM")}
    if reads_indexes:
        del indexes
    rows.close()
    return {"open_s": opened - started, "first_rows_s": begun - started, "stall": waited / (ended - begun), **memory}


def copied_first(files: list[StoredFile], directory: Path, counts: Counts, ranks: Callable[..., Row]) -> Row:
    """What a run does that gives its ranks local files only."""
    directory.mkdir()
    counts.take()
    started, copies = time.monotonic(), []
    for file in files:
        path = directory / file.name
        download(file.uri, path)
        assert digests_of(path).sha256 == file.sha256, file.uri
        copies.append(replace(file, uri=str(path)))
    seconds = time.monotonic() - started
    requests, num_bytes = counts.take()
    row = ranks(copies, reads_indexes=True)
    return {
        **row,
        "open_s": round(row["open_s"] + seconds, 3),
        "first_rows_s": round(row["first_rows_s"] + seconds, 3),
        "requests": requests,
        "fetched_mb": round(num_bytes / MB, 1),
    }


def _memory_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


if __name__ == "__main__":
    main()
