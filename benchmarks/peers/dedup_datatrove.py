"""datatrove's MinHash pipeline over a JSONL directory, run by the peers' Python:

    python dedup_datatrove.py INPUT OUTPUT WORKERS own|white_space

Four steps with its defaults (14 buckets of 8 hashes, 5-grams), with its own words (for English spaCy's) or with words
by white space. Last line: a JSON object with seconds per step and the ids that stayed.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from pathlib import Path


class Splitter:
    """Words by white space: what the pipeline takes without the time of its own tokenizer."""

    def word_tokenize(self, text: str) -> list[str]:
        """The words of a text."""
        return text.split()


def main(source: Path, target: Path, workers: int, words: str) -> None:
    """Time signatures, buckets, clusters and filter one after the other."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
        minhash,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.typeshelper import Languages

    if words == "white_space":
        minhash.load_word_tokenizer = lambda _: Splitter()
    config = MinhashConfig(hash_config=HashConfig(precision=64), num_buckets=14, hashes_per_bucket=8, n_grams=5)
    num_files = len(list(source.glob("*.jsonl.gz")))
    reader = JsonlReader(str(source), glob_pattern="*.jsonl.gz")
    folders = {name: str(target / name) for name in ("signatures", "buckets", "remove", "kept")}
    steps = {
        "signatures": (
            [reader, MinhashDedupSignature(folders["signatures"], config=config, language=Languages.english)],
            num_files,
        ),
        "buckets": (
            [MinhashDedupBuckets(folders["signatures"], folders["buckets"], config=config)],
            config.num_buckets,
        ),
        "cluster": ([MinhashDedupCluster(folders["buckets"], folders["remove"], config=config)], 1),
        "filter": ([reader, MinhashDedupFilter(folders["remove"]), JsonlWriter(folders["kept"])], num_files),
    }
    seconds = {}
    for name, (pipeline, tasks) in steps.items():
        started = time.monotonic()
        LocalPipelineExecutor(
            pipeline, tasks=tasks, workers=min(workers, tasks), logging_dir=str(target / "logs" / name)
        ).run()
        seconds[name] = time.monotonic() - started
    parts = [gzip.decompress(path.read_bytes()).decode() for path in sorted(Path(folders["kept"]).glob("*.gz"))]
    kept = [json.loads(line)["id"] for part in parts for line in part.split("\n") if line]
    print(json.dumps({"seconds": seconds, "kept": kept}))


if __name__ == "__main__":
    os.environ["DATATROVE_COLORIZE_LOGS"] = "0"
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
