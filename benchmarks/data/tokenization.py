"""Tokens per second from JSONL.gz files to token shards, beside datatrove's DocumentTokenizer with the same tokenizer
and 2 workers.

    python -m benchmarks.data.tokenization [--input DIR] [--write]

DIR holds *.jsonl.gz files with `id` and `text`; without one, texts of the shared data are taken. Both sides read the
files, tokenize and write shards; our Spark session and datatrove's imports are up before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.inputs.tokenize_steps import (
    NUM_WORKERS,
    Sample,
    Source,
    files_of,
    learn,
    records_of,
    shard_files,
    shared_corpus,
)
from benchmarks.peers.environment import peers_python
from benchmarks.results import report
from infra.code_digest import ROOT
from infra.machine.spark import stop_spark
from infra.step import Artifact
from model.text.tokenizer_layout import END_OF_TEXT
from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer
from tests.support.data_inputs import compute, write_jsonl

TOKENIZER_DOCUMENTS = 4000


def main() -> None:
    """Ours, then the peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, help="folder of *.jsonl.gz files with id and text")
    parser.add_argument("--write", action="store_true", help="store the record in benchmarks/results/")
    arguments = parser.parse_args()
    peers_python()  # before ours is measured
    with tempfile.TemporaryDirectory() as folder:
        source = arguments.input or shared_corpus(Path(folder) / "input")
        texts = [record["text"] for path in files_of(source) for record in records_of(path)]
        root = Path(folder) / "ours"
        tokenizer = compute(
            learn, root, recipe=Sample(texts=tuple(texts[:: max(1, len(texts) // TOKENIZER_DOCUMENTS)]))
        )
        ours = measure_ours(source, root, tokenizer)
        peer = measure_peer(source, Path(folder) / "peer", tokenizer.path("tokenizer.json"))
    num_bytes = sum(len(text.encode()) for text in texts)
    report(
        "tokenize",
        ours=ours["num_tokens"] / ours["seconds"],
        peer=peer["num_tokens"] / peer["seconds"],
        unit="tokens/s",
        num_documents=len(texts),
        num_bytes=num_bytes,
        workers=NUM_WORKERS,
        num_tokens=ours["num_tokens"],
        peer_num_tokens=peer["num_tokens"],
        seconds=round(ours["seconds"], 2),
        peer_seconds=round(peer["seconds"], 2),
        cpu_seconds=round(ours["cpu_seconds"], 2),
        peer_cpu_seconds=round(peer["cpu_seconds"], 2),
        load=round(psutil.getloadavg()[0], 1),
        peer_versions=peer["versions"],
    )


def measure_ours(source: Path, root: Path, tokenizer: Artifact[TrainedTokenizer]) -> dict[str, float]:
    """Seconds, CPU seconds of all processes, tokens; the session and its workers are warmed by a first, small job."""
    warm = root / "warm"
    write_jsonl(warm / "few.jsonl.gz", [{"id": str(number), "text": "a few words"} for number in range(10)])
    compute(shard_files, root, tokenizer=tokenizer, recipe=Source(directory=str(warm)))
    before, started = _cpu_seconds(), time.monotonic()
    made = compute(shard_files, root, tokenizer=tokenizer, recipe=Source(directory=str(source)))
    seconds, cpu = time.monotonic() - started, _cpu_seconds() - before
    stop_spark()
    return {"seconds": seconds, "cpu_seconds": cpu, "num_tokens": made.record.num_tokens}


def measure_peer(source: Path, target: Path, tokenizer_path: Path) -> dict[str, float]:
    """The same by datatrove, in its own environment."""
    script = str(ROOT / "benchmarks" / "peers" / "tokenize_datatrove.py")
    command = [peers_python(), script, str(source), str(target), str(tokenizer_path), END_OF_TEXT, str(NUM_WORKERS)]
    cpu: dict[int, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        while running.poll() is None:
            # Its workers are no children of the process that starts them: their times are read while they run.
            for process in psutil.Process(running.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    cpu[process.pid] = times.user + times.system
            time.sleep(0.3)
        assert running.stdout is not None
        output = running.stdout.read()
    if running.returncode:
        raise SystemExit(f"datatrove ended with exit code {running.returncode}: {' '.join(command)}")
    return {**json.loads(output.splitlines()[-1]), "cpu_seconds": sum(cpu.values())}


def _cpu_seconds() -> float:
    """Of this process and all below it."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(time.user + time.system for time in times)


if __name__ == "__main__":
    main()
