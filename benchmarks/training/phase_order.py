"""How fast and in how much memory the order of a phase is built, and what a corpus of trillions of tokens then needs:
python -m benchmarks.training.phase_order [--documents 1000000 4000000] [--write]

Only the shards' indexes are there, of random documents: packing reads no tokens. Each size is packed as a stream of one
epoch and as rows filled by best fit, in a process of its own. `peak_mib` is the largest memory of the process above
that of its imports. `ours` is the pieces per second of the largest stream. `corpus` is computed from the figures of the
largest size, for `--tokens` in documents of as many tokens: `node_mb` is what a node reads of the order to find its
rows, the table of its parts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.results import WRITE_FLAG, report
from configs.files.file_digests import digests_of
from configs.files.stored_files import StoredFile
from configs.schema import PackingRecipe
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.packing.packed_order import ORDER_FILES
from tasks.data.packing.packed_rows import PACKING_FILE
from tasks.data.shards.token_shard import token_dtype, write_index

VOCAB_SIZE, ROW_TOKENS = 151_552, 8192
SHARD_DOCUMENTS, DOMAINS = 50_000, {"code": 0.3, "web": 0.7}
MEAN_TOKENS = 1000
"""Of a document, whose lengths are distributed exponentially."""

Row = dict[str, float]


def main() -> None:
    """Both packings at every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 4_000_000])
    parser.add_argument("--tokens", type=float, default=15e12, help="of the corpus that is computed")
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the record in benchmarks/results")
    given = parser.parse_args()
    table: dict[str, Row] = {}
    for packing in ("stream", "best_fit"):
        for num_documents in given.documents:
            name = f"{packing}, {num_documents:,} documents"
            with tempfile.TemporaryDirectory() as directory:
                context = multiprocessing.get_context("spawn")
                with ProcessPoolExecutor(1, mp_context=context) as process:
                    table[name] = process.submit(build, Path(directory), num_documents, packing).result()
            print(f"{name}: {table[name]}", flush=True)
    largest = table[f"stream, {max(given.documents):,} documents"]
    num_pieces = given.tokens / MEAN_TOKENS
    share = num_pieces / largest["pieces"]
    corpus = {
        "tokens": given.tokens,
        "pieces": num_pieces,
        "hours": round(num_pieces / largest["pieces_per_second"] / 3600, 1),
        "order_gb": round(share * largest["order_mb"] / 1000, 1),
        "files": round(share * largest["files"]),
        "node_mb": round(share * largest["table_mb"], 1),
    }
    report(
        "phase_order",
        ours=largest["pieces_per_second"],
        peer=None,
        unit="pieces per second, a stream",
        table=table,
        corpus=corpus,
    )


def build(directory: Path, num_documents: int, packing: str) -> Row:
    """Write the indexes and pack one epoch of them."""
    draw, dtype = np.random.default_rng(46), token_dtype(VOCAB_SIZE)
    num_shards, files, domains, num_tokens = max(4, num_documents // SHARD_DOCUMENTS), [], {}, 0
    for number in range(num_shards):
        domain = "code" if number < DOMAINS["code"] * num_shards else "web"
        name = f"{domain}-{number:05}"
        lengths = 1 + draw.exponential(MEAN_TOKENS, num_documents // num_shards).astype(np.int64)
        write_index(directory / f"{name}.idx", lengths, dtype)
        digests = digests_of(directory / f"{name}.idx")
        files.append(StoredFile(f"{directory}/{name}.idx", digests.size, digests.sha256, digests.blocks))
        files.append(StoredFile(f"{directory}/{name}.bin", int(lengths.sum()) * dtype.itemsize, "", ()))
        domains[name] = domain
        num_tokens += int(lengths.sum())
    record = SimpleNamespace(domains=domains, shards=tuple(domains))
    shards = SimpleNamespace(record=record, files=lambda pattern: files)
    output = SimpleNamespace(path=lambda name: directory / name, report=lambda progress: None)
    recipe = PackingRecipe(
        num_tokens=int(0.95 * num_tokens) // ROW_TOKENS * ROW_TOKENS,
        sequence_length=ROW_TOKENS,
        mixture={"code": DOMAINS["code"], "web": DOMAINS["web"]},
        packing="best_fit" if packing == "best_fit" else "stream",
        max_epochs=2.0,
        seed=46,
        fim_rate=0.0,
        bucket_weights=(),
    )
    before, started = _peak_mib(), time.monotonic()
    packed = pack_phase.function(shards=shards, chats=None, recipe=recipe, output=output)  # pyright: ignore
    seconds = time.monotonic() - started
    parts = list(directory.glob(ORDER_FILES))
    return {
        "pieces": packed.num_pieces,
        "seconds": round(seconds, 1),
        "pieces_per_second": round(packed.num_pieces / seconds),
        "peak_mib": round(_peak_mib() - before, 1),
        "fill_share": packed.fill_share,
        "files": len(parts),
        "order_mb": round(sum(path.stat().st_size for path in parts) / 1e6, 1),
        "table_mb": round(len(json.dumps(json.loads((directory / PACKING_FILE).read_text())["parts"])) / 1e6, 6),
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
