"""Near-duplicate detection beside datatrove: python -m benchmarks.data.dedup [--input DIR] [--documents N] [--write]

DIR holds *.jsonl.gz with `id`, `text` and optionally `cluster`; the default is built from ../shared/data: 27,771
documents, 64 MB, with near-duplicates planted at ten edit rates and pages of one template. Measured: the step
deduplicate_documents from Parquet documents to survivors, on a Spark session of two cores that is up (one small
corpus goes through first), and datatrove's four MinHash steps with two workers, in .venv-peers, from JSONL to JSONL,
with words by white space instead of its tokenizer's. They take turns, --rounds of them; once more with --larger
documents, because starting costs both something, and the difference of the two sizes shows what one more MB costs.
--own-words times datatrove as it comes as well. Processor seconds count all processes, Java among them: on a busy
machine they say more than time. Truth: all pairs by an inverted index over the shingles (exact, NumPy). Memory: the
largest resident set of the driver's Java process, and what Python's grew by while the step ran, sampled four times a
second.
--no-peer leaves datatrove out: for scaling, compare --documents N with ten times N.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

from benchmarks.inputs.dedup_corpus import NUM_DOCUMENTS, Corpus, LabelledSet, build_corpus, labelled_sets, read_corpus
from benchmarks.peers.environment import peers_python
from benchmarks.processor_time import processor_time
from benchmarks.results import WRITE_FLAG, report
from configs.schema import DeduplicationRecipe, SparkResources
from infra.code_digest import ROOT
from infra.machine.spark import spark_session, stop_spark
from tasks.data.deduplication.deduplicate_documents import DeduplicatedDocuments, deduplicate_documents
from tasks.data.deduplication.earlier_documents import EarlierDocuments
from tasks.data.deduplication.edge_components import smallest_members
from tasks.data.deduplication.minhash import jaccard_counts, shingle_sets
from tests.support.given_documents import given_document, given_documents
from tests.support.toy_steps import local_output

RECIPE = DeduplicationRecipe(
    ngram_size=5, num_permutations=128, threshold=0.7, max_removed_share=1.0, max_cluster_share=1.0, previous=()
)
RESOURCES = SparkResources(master="local[2]", driver_memory="512m", executor_memory="512m", shuffle_partitions=2)
"""512 MB of Java heap: the driver is to stay below 1 GiB, and on a local master it is the executor as well."""
DOCUMENTS_PER_PARTITION = 50_000
"""At most, of what is shuffled: about 100 MB of text."""
NUM_WORKERS = 2
TRUE_SIMILARITY = 0.8
WARM_UP_DOCUMENTS = 500


@dataclass(frozen=True)
class Run:
    """One timed deduplication."""

    record: DeduplicatedDocuments
    seconds: float
    cpu_seconds: float
    driver_mib: int
    kept: np.ndarray
    """For every document the number of the document that is kept for it."""
    neighbours: list[dict[str, object]]


def deduplicate(texts: list[str], directory: Path) -> Run:
    """The step on these texts as one Parquet file."""
    shutil.rmtree(directory, ignore_errors=True)
    documents = [given_document(text, number) for number, text in enumerate(texts)]
    numbers = {row["id"]: number for number, row in enumerate(documents)}
    given = given_documents(directory / "given.parquet", documents)
    del documents
    output = local_output(directory)
    corpus_mib = psutil.Process().memory_info().rss >> 20
    partitions = max(RESOURCES.shuffle_partitions, -(-len(texts) // DOCUMENTS_PER_PARTITION))
    resources = RESOURCES.model_copy(update={"shuffle_partitions": partitions})
    with processor_time() as meter:
        started, cpu = time.monotonic(), meter.seconds()
        record = deduplicate_documents(
            documents=given, previous=EarlierDocuments([], []), recipe=RECIPE, resources=resources, output=output
        )
        seconds, cpu = time.monotonic() - started, meter.seconds() - cpu
    driver_mib = sum(meter.driver_mib.values()) - corpus_mib
    kept = np.arange(len(texts))
    for row in pq.read_table(directory / "dropped.parquet", columns=["id", "kept_id"]).to_pylist():
        kept[numbers[row["id"]]] = numbers[row["kept_id"]]
    return Run(record, seconds, cpu, driver_mib, kept, pq.read_table(directory / "neighbours.parquet").to_pylist())


def run_datatrove(texts: list[str], directory: Path, words: str) -> dict[str, Any]:
    """datatrove's steps on the same texts, in as many files as workers."""
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "input").mkdir(parents=True)
    for worker in range(NUM_WORKERS):
        lines = (
            json.dumps({"id": str(number), "text": texts[number]}) + "\n"
            for number in range(worker, len(texts), NUM_WORKERS)
        )
        with gzip.open(directory / "input" / f"{worker}.jsonl.gz", "wt", compresslevel=1, encoding="utf-8") as file:
            file.writelines(lines)
    script = ROOT / "benchmarks" / "peers" / "dedup_datatrove.py"
    folders = (str(directory / "input"), str(directory / "output"))
    command = [peers_python(), str(script), *folders, str(NUM_WORKERS), words]
    with (
        open(directory / "stdout", "w+") as stdout,
        open(directory / "stderr", "w") as stderr,
        processor_time(only_new=True) as meter,
    ):
        before = meter.seconds()
        # Its workers are children of a fork server, whose times nobody inherits.
        process = subprocess.run(command, stdout=stdout, stderr=stderr, check=False)
        spent = meter.seconds() - before
    if process.returncode:
        raise SystemExit(f"datatrove failed:\n{(directory / 'stderr').read_text()[-2000:]}")
    run = json.loads((directory / "stdout").read_text().splitlines()[-1])
    return {**run, "total": sum(run["seconds"].values()), "cpu_seconds": spent}


def true_pairs(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(left, right, similarity) of all pairs of TRUE_SIMILARITY or more. Exact: two such sets share one of the rarest
    shingles of each, as many as fit under the similarity (prefix filter); whoever shares one is compared."""
    parts = [shingle_sets(texts[start : start + 500], RECIPE.ngram_size) for start in range(0, len(texts), 500)]
    shingles = np.concatenate([values for values, _ in parts])
    sizes = np.concatenate([np.diff(offsets) for _, offsets in parts])
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    owners = np.repeat(np.arange(len(texts)), sizes)
    _, indices, counts = np.unique(shingles, return_inverse=True, return_counts=True)
    order = np.lexsort((indices, counts[indices], owners))
    rank = np.arange(len(shingles)) - np.repeat(offsets[:-1], sizes)
    in_prefix = rank < np.repeat(sizes - np.ceil(TRUE_SIMILARITY * sizes).astype(np.int64) + 1, sizes)
    rare = order[in_prefix & (counts[indices[order]] > 1)]
    rare = rare[np.lexsort((owners[rare], indices[rare]))]
    keys, documents = indices[rare], owners[rare]
    codes_of_pairs = set()
    distance = 1
    while len(keys) > distance and (is_pair := keys[distance:] == keys[:-distance]).any():
        left = np.flatnonzero(is_pair)
        codes_of_pairs.update((documents[left] * len(texts) + documents[left + distance]).tolist())
        distance += 1
    codes = np.array(sorted(codes_of_pairs), dtype=np.int64)
    left, right = codes // len(texts), codes % len(texts)
    shared, union = jaccard_counts(shingles, offsets, left, right)
    is_true = shared >= TRUE_SIMILARITY * union
    return left[is_true], right[is_true], shared[is_true] / union[is_true]


def accuracy(labelled: LabelledSet, directory: Path) -> dict[str, object]:
    """Of the pairs that people call duplicates those that fell together, and of those that did the share that people
    call so."""
    kept = deduplicate(labelled.texts, directory).kept
    if labelled.judged is not None:
        levels = sorted(set(labelled.judged.values()))
        together = {
            level: [kept[low] == kept[high] for (low, high), name in labelled.judged.items() if name == level]
            for level in levels
        }
        return {f"together_at_{level}": f"{sum(merged)} of {len(merged)}" for level, merged in together.items()}
    merged = {(low, high) for low in range(len(kept)) for high in range(low + 1, len(kept)) if kept[low] == kept[high]}
    right = len(merged & labelled.pairs)
    return {
        "pairs": len(labelled.pairs),
        "recall": round(right / len(labelled.pairs), 4),
        "precision": round(right / max(len(merged), 1), 4),
    }


def truth_figures(texts: list[str], run: Run) -> dict[str, object]:
    """Recall against all pairs, and what must hold of every removed document and every component."""
    left, right, _ = true_pairs(texts)
    recall = float((run.kept[left] == run.kept[right]).mean()) if len(left) else 1.0
    is_kept = run.kept == np.arange(len(texts))
    roots = smallest_members(len(texts), np.arange(len(texts)), run.kept)
    num_near = run.record.dropped.get("near_duplicate", 0)
    assert len(run.neighbours) == num_near and all(row["similarity"] >= RECIPE.threshold for row in run.neighbours)
    assert (np.bincount(roots, weights=is_kept)[np.unique(roots)] == 1).all(), "a component keeps exactly one document"
    return {
        "true_pairs": len(left),
        "recall": round(recall, 5),
        "removed": int((~is_kept).sum()),
        "removed_with_verified_neighbour": num_near,
        "components_with_one_survivor": len(np.unique(roots)),
    }


def take_turns(corpus: Corpus, directory: Path, rounds: int) -> tuple[list[Run], list[dict[str, Any]]]:
    """Ours and datatrove with words by white space, one after the other, `rounds` times."""
    runs, peers = [], []
    for _ in range(rounds):
        runs.append(deduplicate(corpus.texts, directory / "ours"))
        peers.append(run_datatrove(corpus.texts, directory / "peer", "white_space"))
        times = f"{runs[-1].cpu_seconds:.1f} and {peers[-1]['cpu_seconds']:.1f} processor s"
        print(f"{corpus.name}: {times}, {runs[-1].seconds:.1f} and {peers[-1]['total']:.1f} s", flush=True)
    return runs, peers


def costs(corpus: Corpus, runs: list[Run], peers: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the turns of one size; the ratio is that of processor seconds."""
    ours, peer = (
        float(np.median(seconds)) for seconds in ([r.cpu_seconds for r in runs], [p["cpu_seconds"] for p in peers])
    )
    return {
        "documents": len(corpus.texts),
        "megabytes": round(corpus.num_bytes / 1e6, 1),
        "rounds": len(runs),
        "ours": round(ours, 2),
        "peer": round(peer, 2),
        "ratio": round(peer / ours, 3),
        "seconds": round(float(np.median([run.seconds for run in runs])), 1),
        "peer_seconds": round(float(np.median([one["total"] for one in peers])), 1),
    }


def marginal(small: dict[str, Any], large: dict[str, Any]) -> dict[str, float]:
    """Processor seconds of one more MB, and how many times as many the peer's are."""
    megabytes = large["megabytes"] - small["megabytes"]
    ours, peer = ((large[name] - small[name]) / megabytes for name in ("ours", "peer"))
    return {"ours": round(ours, 4), "peer": round(peer, 4), "ratio": round(peer / ours, 3)}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="near-duplicate detection beside datatrove")
    parser.add_argument("--input", type=Path, help="directory of *.jsonl.gz with id, text and optionally cluster")
    parser.add_argument("--documents", type=int, help="how many documents")
    parser.add_argument("--rounds", type=int, default=3, help="turns of ours and datatrove")
    parser.add_argument("--larger", type=int, default=100_000, help="documents of the larger made corpus, once")
    parser.add_argument("--own-words", action="store_true", help="time datatrove with its own tokenizer as well")
    parser.add_argument("--no-peer", action="store_true", help="leave datatrove out")
    parser.add_argument(WRITE_FLAG, action="store_true", help="store benchmarks/results/dedup.json")
    return parser.parse_args()


def main() -> None:
    """Ours, the peer, the truth; one JSON line."""
    options = arguments()
    if not options.no_peer:
        peers_python()  # before ours is measured
    corpus = (
        read_corpus(options.input, options.documents)
        if options.input
        else build_corpus(options.documents or NUM_DOCUMENTS)
    )
    spark_session(RESOURCES)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        deduplicate(corpus.texts[:WARM_UP_DOCUMENTS], directory / "warm-up")
        if options.no_peer:
            run = deduplicate(corpus.texts, directory / "ours")
            own = {"seconds": run.seconds, "cpu_seconds": run.cpu_seconds, "driver_mib": run.driver_mib}
            print(json.dumps(own | truth_figures(corpus.texts, run) | _labelled(corpus, run)))
            return
        runs, peers = take_turns(corpus, directory, options.rounds)
        run, figures = runs[-1], {}
        small = costs(corpus, runs, peers)
        if not options.input:
            more = build_corpus(options.larger)
            large = costs(more, *take_turns(more, directory, 1))
            figures = {"larger": large, "per_further_megabyte": marginal(small, large)}
            figures["accuracy"] = {
                labelled.name: accuracy(labelled, directory / labelled.name) for labelled in labelled_sets()
            }
        stop_spark()
        if options.own_words:
            own = run_datatrove(corpus.texts, directory / "own", "own")
            figures["own_words"] = {"seconds": own["total"], "cpu_seconds": own["cpu_seconds"]}
        figures |= truth_figures(corpus.texts, run) | _labelled(corpus, run)
    report(
        "dedup",
        ours=small.pop("ours"),
        peer=small.pop("peer"),
        unit="processor s",
        lower_is_better=True,
        **small,
        corpus=corpus.name,
        driver_mib=max(one.driver_mib for one in runs),
        peer_kept=len(peers[-1]["kept"]),
        kept=run.record.num_documents,
        dropped=run.record.dropped,
        verified_pairs=run.record.num_verified_pairs,
        **figures,
        libraries={name: version(name) for name in ("pyspark", "numpy", "pyarrow", "datasketch")}
        | {"datatrove": "0.10.1"},
    )


def _labelled(corpus: Corpus, run: Run) -> dict[str, object]:
    """Where the input names clusters: pairs of one cluster that fell together, and pairs that did without being of
    one."""
    if corpus.clusters is None:
        return {}
    _, own = np.unique(corpus.clusters, return_inverse=True)

    def pairs(groups: np.ndarray) -> int:
        sizes = np.unique(groups, return_counts=True)[1].astype(np.int64)
        return int((sizes * (sizes - 1) // 2).sum())

    _, joined = np.unique(run.kept, return_inverse=True)
    both = pairs(own * (joined.max() + 1) + joined)
    return {
        "cluster_recall": round(both / max(pairs(own), 1), 4),
        "cluster_precision": round(both / max(pairs(joined), 1), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
