"""Data: documents from the sources, cleaned in named steps, contracted at every hand-over, to token shards and an evaluation suite."""

from __future__ import annotations

from dataclasses import dataclass

from prefect import flow

from flows.check_contract import check_contract
from flows.run_step import Run, run_step
from infra.spark import stop_spark
from infra.step import Artifact
from tasks.data.decontaminate_documents import DecontaminatedDocuments, decontaminate_documents
from tasks.data.deduplicate_documents import DeduplicatedDocuments, deduplicate_documents
from tasks.data.filter_documents import FilteredDocuments, filter_documents
from tasks.data.ingest_documents import IngestedDocuments, ingest_documents
from tasks.data.list_sources import SourceListing
from tasks.data.shard_documents import TokenShards, shard_documents
from tasks.data.split_documents import SplitDocuments, split_documents
from tasks.data.synthesize_problems import SynthesizedProblems, synthesize_problems
from tasks.data.train_tokenizer import TrainedTokenizer, train_tokenizer
from tasks.evaluation.select_evaluation_items import EvaluationSuite, select_evaluation_items


@dataclass(frozen=True)
class PreparedData:
    """What training, evaluation and the report need of the data."""

    ingested: Artifact[IngestedDocuments]
    deduplicated: Artifact[DeduplicatedDocuments]
    split: Artifact[SplitDocuments]
    filtered: Artifact[FilteredDocuments]
    problems: Artifact[SynthesizedProblems]
    decontaminated: Artifact[DecontaminatedDocuments]
    tokenizer: Artifact[TrainedTokenizer]
    shards: Artifact[TokenShards]
    suite: Artifact[EvaluationSuite]


@flow(name="prepare_data", flow_run_name="prepare_data", validate_parameters=False)
def prepare_data(run: Run, sources: SourceListing) -> PreparedData:
    """Prepare the data of a scale; Spark is stopped at the end."""
    recipe, spark = run.scale.data.recipe, run.scale.data.resources
    ingested = run_step(run, ingest_documents, sources=sources, recipe=recipe.ingest, resources=spark)
    check_contract(run, ingested, "ingested")
    deduplicated = run_step(run, deduplicate_documents, documents=ingested, recipe=recipe.deduplicate, resources=spark)
    check_contract(run, deduplicated, "deduplicated")
    split = run_step(run, split_documents, documents=deduplicated, recipe=recipe.split, resources=spark)
    check_contract(run, split, "split")
    filtered = run_step(run, filter_documents, documents=split, recipe=recipe.filter, resources=spark)
    check_contract(run, filtered, "filtered")
    problems = run_step(run, synthesize_problems, recipe=recipe.synthesize)
    check_contract(run, problems, "problems")
    decontaminated = run_step(
        run,
        decontaminate_documents,
        documents=filtered,
        synthetic=problems,
        ingested=ingested,
        recipe=recipe.decontaminate,
        resources=spark,
    )
    check_contract(run, decontaminated, "decontaminated")
    tokenizer = run_step(run, train_tokenizer, documents=decontaminated, recipe=recipe.tokenizer, resources=spark)
    check_contract(run, tokenizer, "tokenizer")
    shards = run_step(run, shard_documents, documents=decontaminated, tokenizer=tokenizer, resources=spark)
    check_contract(run, shards, "shards")
    suite = run_step(
        run, select_evaluation_items, documents=decontaminated, problems=problems, tokenizer=tokenizer, recipe=run.scale.evaluation.recipe
    )
    check_contract(run, suite, "evaluation_suite")
    stop_spark()
    return PreparedData(ingested, deduplicated, split, filtered, problems, decontaminated, tokenizer, shards, suite)
