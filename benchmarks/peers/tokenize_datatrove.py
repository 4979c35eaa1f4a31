"""datatrove's DocumentTokenizer over a JSONL directory, run by the peers' Python: python tokenize_datatrove.py INPUT
OUTPUT TOKENIZER END_TOKEN WORKERS. Last line: a JSON object with seconds and tokens."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path


def main(source: Path, target: Path, tokenizer: str, end_token: str, workers: int) -> None:
    """One task per input file; documents are not shuffled, which would be a second pass."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    files = sorted(source.glob("*.jsonl.gz"))
    reader = JsonlReader(str(source), glob_pattern="*.jsonl.gz")
    writer = DocumentTokenizer(
        str(target / "tokens"), tokenizer_name_or_path=tokenizer, eos_token=end_token, shuffle_documents=False
    )
    started = time.monotonic()
    LocalPipelineExecutor([reader, writer], tasks=len(files), workers=workers, logging_dir=str(target / "logs")).run()
    seconds = time.monotonic() - started
    num_tokens = sum(path.stat().st_size for path in (target / "tokens").rglob("*.ds")) // 2
    versions = {name: version(name) for name in ("datatrove", "tokenizers")}
    print(json.dumps({"seconds": seconds, "num_tokens": num_tokens, "versions": versions}))


if __name__ == "__main__":
    os.environ["DATATROVE_COLORIZE_LOGS"] = "0"
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
