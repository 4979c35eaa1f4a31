"""What every data stage costs: python -m benchmarks.data.stages [--input SMALL LARGE] [--documents N] [--write]

Runs the chain of flows/prepare_data.py at tiny's settings from sources to token shards, without contracts, on a Spark
session of two cores that is up: on N documents, and in another session on TIMES as many. The two sizes give the cost of
starting (processes, imports, models, first jobs) and of one more MB of text that a stage reads, in processor seconds of
all processes; beside them the bytes per document that went through Spark's shuffle, the time of the whole chain, and
the memory of the driver. SMALL and LARGE are data directories as for `glm46 run --data`; the default is the corpus of
benchmarks/data/dedup.py beside the labelled records of ../shared/data. These are the figures of the table in
docs/data.md; there is no peer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.inputs.dedup_corpus import build_corpus
from benchmarks.processor_time import ProcessorTime, processor_time
from benchmarks.results import WRITE_FLAG, report
from configs.load import load_scale
from configs.schema import DataRecipe, SparkResources
from infra.machine.spark import spark_session, stop_spark
from infra.step import Artifact, Step
from tasks.data.shards.shard_documents import shard_documents
from tasks.data.sources.list_sources import list_sources
from tasks.data.tokenizer.train_tokenizer import train_tokenizer
from tests.support.data_inputs import SHARED_DATA, cleaned, compute, write_jsonl

RESOURCES = SparkResources(master="local[2]", driver_memory="512m", executor_memory="512m", shuffle_partitions=4)
"""512 MB of Java heap: the driver is to stay below 1 GiB, and on a local master it is the executor as well."""
LABELLED = {
    "toxicity": ("safety/davidson_toxicity.jsonl.gz", "tweet"),
    "quality": ("quality/dclm_human_quality.jsonl.gz", "text"),
}
NUM_DOCUMENTS = 10_000
TIMES = 10
NUM_FILES = 8


@dataclass(frozen=True)
class Cost:
    """Of one stage; documents and their text as the stage read them."""

    num_documents: int
    megabytes: float
    cpu_seconds: float
    shuffled_bytes_per_document: float
    stored_bytes_per_mb: float
    """Size of the stage's files."""


@dataclass(frozen=True)
class Chain:
    """One pass through all stages; seconds of those that read documents."""

    num_documents: int
    megabytes: float
    seconds: float
    cpu_seconds: float
    cpu_seconds_per_mb: float
    """Sum over the stages, each per MB that it read."""
    python_mib: int
    java_mib: int
    """Largest resident sets of the driver's processes."""


def main() -> None:
    """Two chains, stage by stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, nargs=2, help="data directories; by default built from the shared data")
    parser.add_argument("--documents", type=int, default=NUM_DOCUMENTS, help="documents of the small default")
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the record in benchmarks/results/")
    arguments = parser.parse_args()
    chains, costs = [], []
    with tempfile.TemporaryDirectory() as folder:
        directories = arguments.input or [
            _written(Path(folder) / f"data-{times}", arguments.documents * times) for times in (1, TIMES)
        ]
        for number, directory in enumerate(directories):
            chain, own = _measured_chain(directory, Path(folder) / f"store-{number}")
            chains.append(chain)
            costs.append(own)
    table = {name: _by_size(cost, costs[1][name]) for name, cost in costs[0].items()}
    for name, row in table.items():
        print(
            f"{name:28} {row['cpu_seconds_per_further_mb']:8.3f} processor s per further MB, "
            f"{row['start_seconds']:6.1f} to start, {row['shuffled_bytes_per_document']:8,.0f} shuffled bytes "
            "per document"
        )
    small, large = chains
    report(
        "stages",
        ours=sum(row["cpu_seconds_per_further_mb"] for row in table.values()),
        peer=None,
        unit="processor seconds per further MB",
        start_seconds=round(sum(row["start_seconds"] for row in table.values()), 1),
        times_documents=round(large.num_documents / small.num_documents, 2),
        times_cpu_seconds=round(large.cpu_seconds / small.cpu_seconds, 2),
        times_seconds=round(large.seconds / small.seconds, 2),
        chains=[asdict(chain) for chain in chains],
        table=table,
    )


def _by_size(small: Cost, large: Cost) -> dict[str, float]:
    """The larger chain's costs, with the line through both sizes."""
    further = (large.cpu_seconds - small.cpu_seconds) / (large.megabytes - small.megabytes)
    start = small.cpu_seconds - further * small.megabytes
    return {**asdict(large), "cpu_seconds_per_further_mb": further, "start_seconds": start}


def _written(directory: Path, num_documents: int) -> Path:
    """A data directory: documents in JSON lines, and the labelled records. Another process holds the texts, not the
    driver."""
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(directory, num_documents))
    writer.start()
    writer.join()
    assert writer.exitcode == 0, writer.exitcode
    return directory


def _write(directory: Path, num_documents: int) -> None:
    texts = build_corpus(num_documents).texts
    for number in range(NUM_FILES):
        records = [{"id": str(index), "text": texts[index]} for index in range(number, len(texts), NUM_FILES)]
        write_jsonl(directory / f"web-{number}.jsonl.gz", records)
    entries = ["  - {files: 'web-*.jsonl.gz', role: pretrain, domain: web}"]
    for kind, (name, text) in LABELLED.items():
        shutil.copy(SHARED_DATA / name, directory / f"{kind}.jsonl.gz")
        entries.append(f"  - {{files: {kind}.jsonl.gz, role: classifier, kind: {kind}, text: {text}, label: label}}")
    (directory / "glm46-data.yaml").write_text("\n".join(["version: 1", "entries:", *entries, ""]))


def _measured_chain(directory: Path, store: Path) -> tuple[Chain, dict[str, Cost]]:
    """In a session of its own, which starts its processes anew."""
    spark_session(RESOURCES).range(1000).repartition(2).count()  # the session is up
    costs: dict[str, Cost] = {}
    started = time.monotonic()
    with processor_time() as meter:
        _run_chain(directory, store, costs, meter)
    seconds = time.monotonic() - started
    stop_spark()
    first = next(iter(costs.values()))
    chain = Chain(
        first.num_documents,
        first.megabytes,
        seconds,
        sum(cost.cpu_seconds for cost in costs.values()),
        sum(cost.cpu_seconds / cost.megabytes for cost in costs.values()),
        meter.driver_mib["python"],
        meter.driver_mib["java"],
    )
    print(chain, flush=True)
    return chain, costs


def _run_chain(directory: Path, store: Path, costs: dict[str, Cost], meter: ProcessorTime) -> None:
    """Steps that read documents, with their costs."""

    def measured(step: Step[Any], root: Path, **arguments: Any) -> Artifact[Any]:
        seconds, shuffled = meter.seconds(), _shuffled_bytes()
        artifact = compute(step, root, **arguments)
        read = arguments.get("documents", arguments.get("records", artifact)).record
        if "resources" in arguments:
            costs[step.name] = Cost(
                read.num_documents,
                read.num_bytes / 1e6,
                meter.seconds() - seconds,
                (_shuffled_bytes() - shuffled) / read.num_documents,
                sum(file.size for file in artifact.files("*")) / read.num_bytes * 1e6,
            )
        print(step.name, costs.get(step.name, "reads no documents"), flush=True)
        return artifact

    recipe = _without_ceilings(load_scale("tiny").data.recipe)
    artifacts = cleaned(list_sources(directory), store, recipe, RESOURCES, measured)
    documents = artifacts["decontaminated"]
    tokenizer = measured(train_tokenizer, store, documents=documents, recipe=recipe.tokenizer, resources=RESOURCES)
    measured(
        shard_documents, store, documents=documents, tokenizer=tokenizer, recipe=recipe.shards, resources=RESOURCES
    )


def _without_ceilings(recipe: DataRecipe) -> DataRecipe:
    """All of the input; and the corpus holds planted duplicates, more than a run would take."""
    stages = ("boilerplate", "deduplicate", "semantic")
    raised = {name: getattr(recipe, name).model_copy(update={"max_removed_share": 1.0}) for name in stages}
    return recipe.model_copy(update={**raised, "ingest": recipe.ingest.model_copy(update={"max_source_bytes": 10**15})})


def _shuffled_bytes() -> int:
    """Written by all stages of the session until now."""
    context: Any = spark_session(RESOURCES).sparkContext
    no_quantiles = context._gateway.new_array(context._gateway.jvm.double, 0)
    stages = context._jsc.sc().statusStore().stageList(None, False, False, no_quantiles, None)
    return sum(stages.apply(index).shuffleWriteBytes() for index in range(stages.size()))


if __name__ == "__main__":
    main()
