"""What every data stage costs: python -m benchmarks.data.stages [--input DIR] [--documents N] [--write]

Runs the chain of flows/prepare_data.py at tiny's settings from sources to token shards, without contracts, on a Spark
session of two cores that is up, and prints per stage the processor seconds of all processes per MB of text that the
stage read, and the bytes per document that went through Spark's shuffle. DIR is a data directory as for `glm46 run
--data`; the default is the corpus of benchmarks/data/dedup.py beside the labelled records of ../shared/data. These are
the figures of the table in docs/data.md; there is no peer.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
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

RESOURCES = SparkResources(master="local[2]", driver_memory="1g", executor_memory="1g", shuffle_partitions=4)
LABELLED = {
    "toxicity": ("safety/davidson_toxicity.jsonl.gz", "tweet"),
    "quality": ("quality/dclm_human_quality.jsonl.gz", "text"),
}
NUM_DOCUMENTS = 10_000
NUM_FILES = 8


@dataclass(frozen=True)
class Cost:
    """Of one stage; documents and their text as the stage read them."""

    num_documents: int
    megabytes: float
    cpu_seconds_per_mb: float
    shuffled_bytes_per_document: float
    stored_bytes_per_mb: float
    """Size of the stage's files."""


def main() -> None:
    """One chain, stage by stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, help="data directory; by default one is built from the shared data")
    parser.add_argument("--documents", type=int, default=NUM_DOCUMENTS, help="documents of the default")
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the record in benchmarks/results/")
    arguments = parser.parse_args()
    spark_session(RESOURCES).range(1000).repartition(2).count()  # the session is up
    costs: dict[str, Cost] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = arguments.input or _written(Path(folder) / "data", arguments.documents)
        with processor_time() as meter:
            _run_chain(directory, Path(folder) / "store", costs, meter)
    stop_spark()
    for name, cost in costs.items():
        per_mb, shuffled = cost.cpu_seconds_per_mb, cost.shuffled_bytes_per_document
        print(f"{name:28} {per_mb:8.3f} processor s per MB {shuffled:8,.0f} shuffled bytes per document")
    report(
        "stages",
        ours=sum(cost.cpu_seconds_per_mb for cost in costs.values()),
        peer=None,
        unit="processor seconds per MB",
        table={name: asdict(cost) for name, cost in costs.items()},
    )


def _written(directory: Path, num_documents: int) -> Path:
    """A data directory: documents in JSON lines, and the labelled records."""
    texts = build_corpus(num_documents).texts
    for number in range(NUM_FILES):
        records = [{"id": str(index), "text": texts[index]} for index in range(number, len(texts), NUM_FILES)]
        write_jsonl(directory / f"web-{number}.jsonl.gz", records)
    entries = ["  - {files: 'web-*.jsonl.gz', role: pretrain, domain: web}"]
    for kind, (name, text) in LABELLED.items():
        shutil.copy(SHARED_DATA / name, directory / f"{kind}.jsonl.gz")
        entries.append(f"  - {{files: {kind}.jsonl.gz, role: classifier, kind: {kind}, text: {text}, label: label}}")
    (directory / "glm46-data.yaml").write_text("\n".join(["version: 1", "entries:", *entries, ""]))
    return directory


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
                (meter.seconds() - seconds) / read.num_bytes * 1e6,
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
