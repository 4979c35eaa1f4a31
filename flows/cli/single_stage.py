"""Runs one data stage on a user's directory: `glm46 stage NAME --input DIR --output DIR`. No server is needed.

A directory of sources is ingested, extracted and, where the stage reads scores, scored first. The output of an
earlier stage is taken as it is. Everything is computed through the home's store, so earlier results are used again.
--output is locked while a stage runs, and its files appear when all are there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.load import load_scale
from configs.schema import DataRecipe, SparkResources
from flows.cli.stage_output import UNFINISHED, StageOutcome, check_output, explains_output, locked_output, write_output
from flows.running.computation import Computation
from flows.running.stage_log import StageLog
from infra.home import Home
from infra.machine.spark import stop_spark
from infra.step import Artifact, Digested, Progress, R, Step
from infra.storage.open_store import open_store
from infra.storage.store import Store
from tasks.data.complete_documents import CompleteDocuments, DocumentFiles, complete_documents
from tasks.data.decontamination.decontaminate_documents import decontaminate_documents
from tasks.data.deduplication.deduplicate_documents import deduplicate_documents
from tasks.data.deduplication.earlier_documents import list_earlier_documents
from tasks.data.deduplication.remove_semantic_duplicates import remove_semantic_duplicates
from tasks.data.extraction.extract_documents import extract_documents
from tasks.data.extraction.remove_boilerplate import remove_boilerplate
from tasks.data.filtering.blocked_documents import read_block_list
from tasks.data.filtering.filter_documents import filter_documents
from tasks.data.privacy.mask_personal_data import mask_personal_data
from tasks.data.problems.synthesize_problems import SynthesizedProblems, synthesize_problems
from tasks.data.scoring.score_documents import score_documents
from tasks.data.scoring.train_classifiers import train_classifiers
from tasks.data.scoring.train_ngram_model import train_ngram_model
from tasks.data.seeds.vary_problems import VariedProblems, vary_problems
from tasks.data.shards.shard_documents import shard_documents
from tasks.data.sources.ingest_documents import IngestedDocuments, ingest_documents
from tasks.data.sources.list_sources import SourceListing, list_sources
from tasks.data.sources.remote_sources import is_remote
from tasks.data.tokenizer.import_tokenizer import import_tokenizer
from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer, train_tokenizer

DEFAULT_SCALE = "full"
"""The default scale: its recipe holds S0's values. Its resources are a cluster's, so without --config this machine's
replace them."""


@dataclass(frozen=True)
class SingleStage:
    """The steps before a stage, each computed when it is asked for."""

    source: SourceListing | DocumentFiles | None
    recipe: DataRecipe
    resources: SparkResources
    store: Store
    log: StageLog
    artifacts: dict[str, Artifact[Any]] = field(default_factory=dict)
    """Artifacts so far, from the store or computed, by the name of the step."""

    def compute(
        self, step: Step[R], recipe: BaseModel | None, with_spark: bool = True, **inputs: Digested | None
    ) -> Artifact[R]:
        """A step's artifact: found in the store, or computed now."""
        computation, started = (
            Computation(step, inputs, recipe, self.resources if with_spark else None),
            time.monotonic(),
        )

        def report(part: str, progress: Progress) -> None:
            self.log.progress(step.name, progress, part)

        with self.log.running(step.name):
            artifact, is_cached = computation.find_or_run(self.store, report, self.log.say)
        computation.log(self.log, started, artifact, is_cached, "computed")
        self.artifacts[step.name] = artifact
        return artifact

    def ingested(self) -> Artifact[IngestedDocuments]:
        return self.compute(ingest_documents, self.recipe.ingest, sources=self._listing())

    def _listing(self) -> SourceListing:
        if not isinstance(self.source, SourceListing):
            raise ValueError(
                "this stage reads sources (evaluation files among them): name their directory, not the output of a "
                "stage"
            )
        return self.source

    def extracted(self) -> Artifact[Any] | DocumentFiles:
        if isinstance(self.source, DocumentFiles):
            return self.source
        return self.compute(extract_documents, self.recipe.extract, records=self.ingested())

    def complete(self) -> Artifact[CompleteDocuments]:
        """Documents with every column that a stage reads, from sources or from an earlier stage."""
        return self.compute(complete_documents, None, documents=self.extracted())

    def ranked(self) -> Artifact[Any]:
        """For stages that keep the best of several: sources are scored, documents of an earlier stage keep its
        scores."""
        return self.complete() if isinstance(self.source, DocumentFiles) else self.scored()

    def scored(self) -> Artifact[Any]:
        """Documents scored with classifiers from the sources' labelled records. Documents of an earlier stage keep
        their scores; those without scores get the ones that need no labelled records."""
        sources, documents = SourceListing(()), self.extracted()
        if isinstance(self.source, DocumentFiles):
            documents = self.complete()
            if documents.record.num_scored:
                self.log.say(
                    f"score: {documents.record.num_scored:,} of {documents.record.num_documents:,} documents have "
                    f"scores: they stay"
                )
                return documents
            self.log.say(
                "only language and perplexity: the other scores are learned from labelled records, so score their "
                "directory"
            )
        else:
            sources = self._listing()
        classifiers = self.compute(train_classifiers, self.recipe.classifiers, with_spark=False, sources=sources)
        ngram_model = self.compute(train_ngram_model, self.recipe.ngram_training, sources=sources, documents=documents)
        models = {"classifiers": classifiers, "ngram_model": ngram_model}
        return self.compute(score_documents, self.recipe.language, documents=documents, **models)

    def problems(self) -> Artifact[SynthesizedProblems]:
        return self.compute(synthesize_problems, self.recipe.synthesize, with_spark=False)

    def variations(self) -> Artifact[VariedProblems]:
        return self.compute(vary_problems, self.recipe.seed_variations, with_spark=False, sources=self._listing())

    def tokenizer(self) -> Artifact[TrainedTokenizer]:
        if self.recipe.tokenizer.kind == "given":
            return self.compute(import_tokenizer, self.recipe.tokenizer, with_spark=False)
        return self.compute(train_tokenizer, self.recipe.tokenizer, documents=self.complete())


STAGES: dict[str, Callable[[SingleStage], Artifact[Any]]] = {
    "extract": lambda run: run.compute(extract_documents, run.recipe.extract, records=run.ingested()),
    "boilerplate": lambda run: run.compute(remove_boilerplate, run.recipe.boilerplate, documents=run.complete()),
    "score": lambda run: run.scored(),
    "deduplicate": lambda run: run.compute(
        deduplicate_documents,
        run.recipe.deduplicate,
        documents=run.ranked(),
        previous=list_earlier_documents(run.recipe.deduplicate.previous),
    ),
    "semantic": lambda run: run.compute(remove_semantic_duplicates, run.recipe.semantic, documents=run.ranked()),
    "filter": lambda run: run.compute(
        filter_documents,
        run.recipe.filter,
        documents=run.scored(),
        extracted=None,  # no paragraph was cut from these
        blocked=read_block_list(run.store.home.root, run.recipe.filter.block_list),
    ),
    "personal_data": lambda run: run.compute(mask_personal_data, run.recipe.personal_data, documents=run.complete()),
    "synthesize": lambda run: run.problems(),
    "seed_variations": lambda run: run.variations(),
    "decontaminate": lambda run: run.compute(
        decontaminate_documents,
        run.recipe.decontaminate,
        documents=run.complete(),
        synthetic=None,
        prompts=None,
        ingested=run.ingested(),
    ),
    "tokenizer": lambda run: run.tokenizer(),
    "shards": lambda run: run.compute(
        shard_documents, run.recipe.shards, documents=run.complete(), tokenizer=run.tokenizer()
    ),
}
"""Stages by the name of their section in data.recipe."""
PARTITION_BYTES = 64 * 2**20
PARQUET_RATIO = 3
WITHOUT_INPUT = ("synthesize",)
NEEDED_ROLE = {"seed_variations": "prompts"}
"""Role of the sources that a stage needs, where it is not documents to train on."""


def open_stage(
    name: str, address: str | Path | None, output_dir: Path, config: str | None, home: Home
) -> Callable[[], StageOutcome]:
    """A function that runs a stage and puts its files into `output_dir`. Raises ValueError for an unknown name, wrong
    directories or a master that this machine cannot reach, before any work."""
    if name not in STAGES:
        raise ValueError(f"no stage {name!r}: the stages are {', '.join(STAGES)}")
    check_output(output_dir, address)
    scale = load_scale(config or DEFAULT_SCALE)
    if config:
        _check_master(scale.data.resources.master)
    log = StageLog()
    source = _source(name, address, log, scale.data.recipe.ingest.max_record_bytes)
    resources = scale.data.resources if config else this_machine(_num_bytes(source))
    run = SingleStage(source, scale.data.recipe, resources, open_store(None, home), log)

    def compute() -> StageOutcome:
        with locked_output(output_dir):
            artifact = STAGES[name](run)
            stop_spark()
            earlier = {
                step: other for step, other in run.artifacts.items() if other is not artifact and explains_output(other)
            }
            outcome = StageOutcome(
                stage=name,
                output=str(output_dir),
                digest=artifact.digest,
                record=artifact.record.model_dump(mode="json"),
                earlier={step: other.record.model_dump(mode="json") for step, other in earlier.items()},
            )
            write_output(artifact, earlier, outcome, output_dir)
        return outcome

    return compute


def _check_master(master: str) -> None:
    if master == "yarn" and not {"HADOOP_CONF_DIR", "YARN_CONF_DIR"} & set(os.environ):
        raise ValueError(
            "data.resources.master is yarn, and neither HADOOP_CONF_DIR nor YARN_CONF_DIR says where that is: set "
            "one; for full's recipe "
            "on this machine leave --config out, or copy the YAML and write master: local[N]"
        )


def _source(
    name: str, address: str | Path | None, log: StageLog, max_record_bytes: int
) -> SourceListing | DocumentFiles | None:
    if name in WITHOUT_INPUT:
        if address is not None:
            raise ValueError(f"stage {name} makes its documents: leave --input out")
        return None
    if address is None:
        raise ValueError(
            f"stage {name} reads documents: name a directory, s3://bucket/prefix or hf://owner/name with --input"
        )
    if not is_remote(str(address)) and not Path(address).is_dir():
        raise ValueError(
            f"--input {address} does not exist or is no directory: name an existing one, or s3://bucket/prefix or "
            f"hf://owner/name"
        )
    written = DocumentFiles(Path(address).absolute())
    if _left_by_a_stage(written):
        return written
    return list_sources(address, log.say, NEEDED_ROLE.get(name, "pretrain"), max_record_bytes)


def _left_by_a_stage(written: DocumentFiles) -> bool:
    """Whether the files are a stage's output: a user's own Parquet files may be in a directory of that name, too."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if (written.directory / UNFINISHED).exists():
        raise ValueError(f"{written.directory} is the output of a stage that was not finished: run that stage again")
    files = written.files("documents/*.parquet")
    try:
        return bool(files) and "content_digest" in pq.read_schema(files[0].uri).names
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{files[0].uri} cannot be read ({error}): repair it, or run the stage that wrote it again"
        ) from error


def this_machine(num_bytes: int) -> SparkResources:
    """Resources of this machine for `num_bytes` of text: a task's memory does not grow with the input."""
    cores = len(os.sched_getaffinity(0))
    partitions = max(2 * cores, -(-num_bytes // PARTITION_BYTES))
    return SparkResources(
        master=f"local[{cores}]", driver_memory="2g", executor_memory="1g", shuffle_partitions=partitions
    )


def _num_bytes(source: SourceListing | DocumentFiles | None) -> int:
    """Approximate bytes of the text: Parquet holds it compressed."""
    if isinstance(source, SourceListing):
        return sum(file.num_text_bytes for file in source.files)
    return 0 if source is None else PARQUET_RATIO * sum(file.size for file in source.files("documents/*.parquet"))
