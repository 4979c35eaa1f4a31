"""Seconds and memory of learning a byte-level BPE, beside the trainer of `tokenizers` on the same texts; the merges must be the same.

    python -m benchmarks.train_tokenizer [--input DIR] [--tokens 16000] [--write]

DIR holds *.jsonl.gz files with `id` and `text`; without one, texts of the shared data are taken. Each run is a process of its own, so its
peak memory is its own: over a tenth of the texts, over all, and ours also over all of them ten times. Ours counts words in batches, as an
executor does, and learns from the table of distinct words, as the driver does; Spark itself is left out.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from benchmarks.results import report
from benchmarks.tokenize_steps import files_of, shared_corpus

BATCH_DOCUMENTS = 1024
TENTH = 10


def main() -> None:
    """Runs of both sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, help="folder of *.jsonl.gz files with id and text")
    parser.add_argument("--tokens", type=int, default=16_000, help="ordinary tokens to learn")
    parser.add_argument("--write", action="store_true", help="store the record in benchmarks/results/")
    parser.add_argument("--measure", nargs=3, metavar=("SIDE", "EVERY", "TIMES"), help="one run of one side: what this program starts")
    arguments = parser.parse_args()
    if arguments.measure:
        side, every, times = arguments.measure
        print(json.dumps(measure(side, arguments.input, arguments.tokens, int(every), int(times))))
        return
    with tempfile.TemporaryDirectory() as folder:
        source = arguments.input or shared_corpus(Path(folder))
        runs = {
            name: _run(source, arguments.tokens, side, every, times)
            for name, side, every, times in (
                ("ours_tenth", "ours", TENTH, 1), ("peer_tenth", "peer", TENTH, 1), ("ours", "ours", 1, 1), ("peer", "peer", 1, 1),
                ("ours_ten_times", "ours", 1, TENTH),
            )
        }  # fmt: skip
    ours, peer = runs["ours"], runs["peer"]
    report(
        "train_tokenizer", ours=ours["seconds"], peer=peer["seconds"], unit="s", lower_is_better=True, num_tokens=arguments.tokens,
        same_merges=ours["merges"] == peer["merges"], num_bytes=ours["num_bytes"], num_distinct_words=ours["num_words"],
        cpu_seconds=ours["cpu_seconds"], peer_cpu_seconds=peer["cpu_seconds"],
        peak_mib={name: run["peak_mib"] for name, run in runs.items()},
        megabytes={name: round(run["num_bytes"] / 1e6) for name, run in runs.items()},
    )  # fmt: skip


def measure(side: str, source: Path, num_tokens: int, every: int, times: int) -> dict[str, object]:
    """One run: seconds, CPU seconds, peak memory above what was imported, and a digest of the merges."""
    size = [0]

    def batches() -> Iterator[list[str]]:
        for _ in range(times):
            found = _texts(source, every)
            while batch := list(islice(found, BATCH_DOCUMENTS)):
                size[0] += sum(len(text.encode()) for text in batch)
                yield batch

    learn = _ours if side == "ours" else _peer
    learn(iter([["a few words, a few words"]]), 258)  # what a first use loads is no part of the run
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, cpu, started = _peak_mib(), time.process_time(), time.monotonic()
    merges, num_words = learn(batches(), num_tokens)
    return {
        "seconds": round(time.monotonic() - started, 2), "cpu_seconds": round(time.process_time() - cpu, 2), "num_bytes": size[0],
        "peak_mib": round(_peak_mib() - before), "merges": hashlib.sha256(json.dumps(merges).encode()).hexdigest(), "num_words": num_words,
    }  # fmt: skip


def _ours(batches: Iterator[list[str]], num_tokens: int) -> tuple[list[list[str]], int]:
    import pyarrow as pa

    from tasks.data.bpe_tokenizer import bpe_of_words
    from tasks.data.word_counts import count_words, sum_counts, word_table

    counted = count_words(pa.record_batch({"text": batch}) for batch in batches)
    words = word_table(sum_counts([pa.Table.from_batches(counted)]))
    return json.loads(bpe_of_words(words, num_tokens, ()).to_str())["model"]["merges"], len(words.counts)


def _peer(batches: Iterator[list[str]], num_tokens: int) -> tuple[list[list[str]], int]:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    from model.tokenizer_layout import PRETOKENIZER_PATTERN
    from tasks.data.bpe_tokenizer import MIN_PAIR_COUNT

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRETOKENIZER_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, min_frequency=MIN_PAIR_COUNT, special_tokens=[], show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(batches, trainer)
    return json.loads(tokenizer.to_str())["model"]["merges"], 0


def _run(source: Path, num_tokens: int, side: str, every: int, times: int) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.train_tokenizer", "--input", str(source), "--tokens", str(num_tokens)]
    done = subprocess.run([*command, "--measure", side, str(every), str(times)], check=True, stdout=subprocess.PIPE, text=True)
    print(side, every, times, done.stdout.strip(), flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def _texts(source: Path, every: int) -> Iterator[str]:
    number = 0
    for path in files_of(source):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                if number % every == 0:
                    yield json.loads(line)["text"]
                number += 1


def _peak_mib() -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
