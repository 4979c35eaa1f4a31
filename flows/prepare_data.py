"""Data: documents from the sources, cleaned in named steps, contracted at every hand-over, to token shards and an evaluation suite."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.check_contract import check_contract
from flows.run_step import Run, run_step
from infra.spark import stop_spark
from infra.step import Artifact, R
from tasks.data.collect_chats import collect_chats
from tasks.data.concatenate_repositories import concatenate_repositories
from tasks.data.decontaminate_documents import decontaminate_documents
from tasks.data.deduplicate_documents import deduplicate_documents
from tasks.data.filter_documents import filter_documents
from tasks.data.ingest_documents import ingest_documents
from tasks.data.list_sources import SourceListing
from tasks.data.prepared_data import PreparedData
from tasks.data.shard_chats import shard_chats
from tasks.data.shard_documents import shard_documents
from tasks.data.shard_validation import shard_validation
from tasks.data.split_documents import split_documents
from tasks.data.synthesize_problems import synthesize_problems
from tasks.data.train_tokenizer import train_tokenizer
from tasks.data.validate_contract import ContractResult
from tasks.evaluation.select_evaluation_items import select_evaluation_items


@flow(name="prepare_data", flow_run_name="raw documents to token shards", validate_parameters=False)
def prepare_data(run: Run, sources: SourceListing) -> PreparedData:
    """Prepare the data of a scale; Spark is stopped at the end."""
    recipe, spark = run.scale.data.recipe, run.scale.data.resources
    contracts: dict[str, tuple[Artifact[Any], Artifact[ContractResult]]] = {}

    def contracted(artifact: Artifact[R], name: str) -> Artifact[R]:
        contracts[name] = (artifact, check_contract(run, artifact, name))
        return artifact

    ingested = contracted(run_step(run, ingest_documents, sources=sources, recipe=recipe.ingest, resources=spark), "ingested")
    deduplicated = contracted(
        run_step(run, deduplicate_documents, documents=ingested, recipe=recipe.deduplicate, resources=spark), "deduplicated"
    )
    split = contracted(run_step(run, split_documents, documents=deduplicated, recipe=recipe.split, resources=spark), "split")
    filtered = contracted(run_step(run, filter_documents, documents=split, recipe=recipe.filter, resources=spark), "filtered")
    problems = contracted(run_step(run, synthesize_problems, recipe=recipe.synthesize), "problems")
    decontaminated = contracted(
        run_step(
            run, decontaminate_documents, documents=filtered, synthetic=problems, ingested=ingested,
            recipe=recipe.decontaminate, resources=spark,
        ),
        "decontaminated",
    )  # fmt: skip
    repositories = contracted(
        run_step(run, concatenate_repositories, documents=decontaminated, recipe=recipe.repositories, resources=spark), "repositories"
    )
    chats = contracted(
        run_step(
            run, collect_chats, sources=sources, synthetic=problems, ingested=ingested, recipe=recipe.chat_collection, resources=spark
        ),
        "chats",
    )
    tokenizer = contracted(run_step(run, train_tokenizer, documents=decontaminated, recipe=recipe.tokenizer, resources=spark), "tokenizer")
    texts = {"documents": decontaminated, "repositories": repositories, "tokenizer": tokenizer}
    shards = contracted(run_step(run, shard_documents, resources=spark, **texts), "shards")
    validation = contracted(run_step(run, shard_validation, resources=spark, **texts), "validation")
    chat_shards = contracted(run_step(run, shard_chats, chats=chats, tokenizer=tokenizer, resources=spark), "chat_shards")
    suite = contracted(
        run_step(
            run, select_evaluation_items, documents=decontaminated, repositories=repositories, problems=problems, sources=sources,
            tokenizer=tokenizer, recipe=run.scale.evaluation.recipe,
        ),
        "evaluation_suite",
    )  # fmt: skip
    stop_spark()
    return PreparedData(
        ingested, deduplicated, split, filtered, problems, decontaminated, chats, repositories, tokenizer,
        shards, validation, chat_shards, suite, contracts,
    )  # fmt: skip
