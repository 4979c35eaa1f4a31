"""datatrove's WARC reader and Trafilatura extractor over a directory of WARC files, run by the peers' Python: INPUT
OUTPUT WORKERS

Last line: a JSON object with seconds and the number of documents written.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from pathlib import Path


def main(source: Path, target: Path, workers: int) -> None:
    """Time reading, extraction and writing as one pipeline, one task per file."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.extractors import Trafilatura
    from datatrove.pipeline.readers import WarcReader
    from datatrove.pipeline.writers import JsonlWriter

    num_files = len(list(source.glob("*.warc.gz")))
    pipeline = [
        WarcReader(str(source), glob_pattern="*.warc.gz"),
        Trafilatura(favour_precision=False, timeout=30),
        JsonlWriter(str(target / "kept")),
    ]
    started = time.monotonic()
    LocalPipelineExecutor(pipeline, tasks=num_files, workers=workers, logging_dir=str(target / "logs")).run()
    seconds = time.monotonic() - started
    num_documents = sum(gzip.decompress(path.read_bytes()).count(b"\n") for path in (target / "kept").glob("*.gz"))
    print(json.dumps({"seconds": seconds, "num_documents": num_documents}))


if __name__ == "__main__":
    os.environ["DATATROVE_COLORIZE_LOGS"] = "0"
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
