"""Seconds and memory of learning a byte-level BPE, beside the trainer of `tokenizers` on the same texts; the merges
must be the same. And the same corpus with little memory, which the system enforces (RLIMIT_DATA): again the same
merges.

    python -m benchmarks.data.train_tokenizer [--input DIR] [--tokens 16000] [--memory MIB] [--peer-mb MB] [--write]

DIR holds *.jsonl.gz files with `id` and `text`; without one, texts of the shared data are taken. `--peer-mb` compares
on the first texts of the corpus alone: the peer takes ten bytes of memory per byte of text. `--memory` is given to each
process beyond interpreter and libraries; without it, a tenth of the corpus, at least 64 MiB.

Each run is a process of its own: `count` counts words in batches, as an executor does, and sums them by parts
(benchmarks/inputs/word_shuffle.py), as Spark's shuffle does; `learn` learns from the table, as the driver does, holding
a quarter of the memory in arrays and the rest of them in files. Spark itself is left out. A run's peak_mib is anonymous
memory; pages of files, which the system may evict, are not counted.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.inputs.tokenize_steps import files_of, shared_corpus
from benchmarks.inputs.word_shuffle import count_into
from benchmarks.results import report
from tasks.data.records.documents import cut_pieces

BATCH_BYTES = 2**22
PIECE_CHARS = 1_000_000
"""As extract_documents cuts documents at full scale (configs/full.yaml)."""
SMALLEST_MEMORY_MIB = 64
UNLIMITED = 0
HONEST_LIMITS = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
"""So that nothing has reserved memory before the limit is set."""


def main() -> None:
    """Runs of both sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, help="folder of *.jsonl.gz files with id and text")
    parser.add_argument("--tokens", type=int, default=16_000, help="ordinary tokens to learn")
    parser.add_argument(
        "--memory", type=int, default=0, help="MiB given to each process of the limited runs; 0: a tenth of the corpus"
    )
    parser.add_argument("--peer-mb", type=int, default=0, help="MB of text that the peer is run on; 0: all")
    parser.add_argument("--write", action="store_true", help="store the record in benchmarks/results/")
    parser.add_argument(
        "--measure", nargs=4, metavar=("RUN", "WORDS", "MB", "MIB"), help="one run: what this program starts"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        run, words, megabytes, memory = arguments.measure
        print(json.dumps(measure(run, arguments.input, Path(words), arguments.tokens, int(megabytes), int(memory))))
        return
    if arguments.memory < 0 or arguments.peer_mb < 0:
        parser.error(f"--memory {arguments.memory} and --peer-mb {arguments.peer_mb} are 0 or more")
    with tempfile.TemporaryDirectory() as folder:
        _compare(
            arguments.input or shared_corpus(Path(folder)),
            arguments.tokens,
            arguments.memory,
            arguments.peer_mb,
            Path(folder),
        )


def _compare(source: Path, tokens: int, memory: int, peer_mb: int, folder: Path) -> None:
    runs: dict[str, dict[str, Any]] = {}

    def run(name: str, kind: str, words: str, megabytes: int, mib: int) -> dict[str, Any]:
        command = [
            sys.executable,
            "-m",
            "benchmarks.data.train_tokenizer",
            "--input",
            str(source),
            "--tokens",
            str(tokens),
            "--measure",
        ]
        command += [kind, str(folder / words), str(megabytes), str(mib)]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **HONEST_LIMITS}
        )
        runs[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, done.stdout.strip(), flush=True)
        return runs[name]

    counted = run("count", "count", "compared", peer_mb, UNLIMITED)
    learned = run("learn", "learn", "compared", peer_mb, UNLIMITED)
    peer = run("peer", "peer", "compared", peer_mb, UNLIMITED)
    memory = memory or max(SMALLEST_MEMORY_MIB, _corpus_bytes(source) // 10 // 2**20)
    limited_count = run("count_limited", "count", "all", 0, memory)
    limited = run("learn_limited", "learn", "all", 0, memory)
    unlimited = run("learn_unlimited", "learn", "all", 0, UNLIMITED)
    report(
        "train_tokenizer",
        ours=counted["seconds"] + learned["seconds"],
        peer=peer["seconds"],
        unit="s",
        lower_is_better=True,
        num_tokens=tokens,
        same_merges=learned["merges"] == peer["merges"] and limited["merges"] == unlimited["merges"],
        cpu_seconds=counted["cpu_seconds"] + learned["cpu_seconds"],
        peer_cpu_seconds=peer["cpu_seconds"],
        compared_bytes=counted["num_bytes"],
        compared_words=counted["num_words"],
        corpus_bytes=limited_count["num_bytes"],
        corpus_words=limited_count["num_words"],
        memory_mib=memory,
        corpus_per_memory=round(limited_count["num_bytes"] / memory / 2**20, 1),
        peak_mib={name: each["peak_mib"] for name, each in runs.items()},
        seconds={name: each["seconds"] for name, each in runs.items()},
    )


def measure(run: str, source: Path, words: Path, num_tokens: int, megabytes: int, memory: int) -> dict[str, Any]:
    """One run: seconds, CPU seconds, peak anonymous memory beyond what was imported, and a digest of the merges."""
    size = [0]

    def batches() -> Iterator[list[str]]:
        batch, batch_bytes = [], 0
        for text in _texts(source):
            if megabytes and size[0] >= megabytes * 10**6:
                break
            num_bytes = len(text.encode())
            size[0] += num_bytes
            batch.append(text)
            batch_bytes += num_bytes
            if batch_bytes > BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
        yield batch

    few = words.with_name(f"{run}-{memory}-first")
    for first in dict.fromkeys(("count", run)):  # what a first use loads is no part of the run
        _work(first, iter([["a few words, a few words"]] * 2), few, 258, 0)
    with _Peak() as peak:
        if memory:
            limit = _status_mib("VmData") * 2**20 + memory * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        cpu, started = time.process_time(), time.monotonic()
        merges, num_words = _work(run, batches(), words, num_tokens, memory)
        seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "num_bytes": size[0],
        "peak_mib": peak.mib,
        "merges": hashlib.sha256(json.dumps(merges).encode()).hexdigest(),
        "num_words": num_words,
    }


def _work(
    run: str, batches: Iterator[list[str]], words: Path, num_tokens: int, memory: int
) -> tuple[list[list[str]], int]:
    import pyarrow as pa

    from tasks.data.tokenizer.bpe_merges import IN_MEMORY, Room
    from tasks.data.tokenizer.bpe_tokenizer import bpe_of_words
    from tasks.data.tokenizer.word_counts import num_rows, read_words

    if run == "count":
        count_into(words, (pa.record_batch({"text": batch}) for batch in batches))
        return [], num_rows(words)
    if run == "learn":
        room = Room(memory * 2**20 // 4, words) if memory else IN_MEMORY
        return json.loads(bpe_of_words(read_words(words), num_tokens, (), room).to_str())["model"]["merges"], num_rows(
            words
        )
    return _peer(batches, num_tokens), 0


def _peer(batches: Iterator[list[str]], num_tokens: int) -> list[list[str]]:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    from model.text.tokenizer_layout import PRETOKENIZER_PATTERN
    from tasks.data.tokenizer.bpe_tokenizer import MIN_PAIR_COUNT

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRETOKENIZER_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        min_frequency=MIN_PAIR_COUNT,
        special_tokens=[],
        show_progress=False,
        initial_alphabet=alphabet,
    )
    tokenizer.train_from_iterator(batches, trainer)
    return json.loads(tokenizer.to_str())["model"]["merges"]


class _Peak:
    """Most anonymous memory while it is entered, beyond what there was."""

    mib = 0

    def __enter__(self) -> _Peak:
        self._before = _status_mib("RssAnon")
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._done.wait(0.02):
            self.mib = max(self.mib, _status_mib("RssAnon") - self._before)


def _texts(source: Path) -> Iterator[str]:
    for path in files_of(source):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield from (piece for _, piece in cut_pieces(json.loads(line)["text"], PIECE_CHARS))


def _corpus_bytes(source: Path) -> int:
    return sum(len(text.encode()) for text in _texts(source))


def _status_mib(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) // 1024


if __name__ == "__main__":
    main()
