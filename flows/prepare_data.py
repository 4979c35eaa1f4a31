"""Data: prepares documents from the sources in named steps, to token shards and an evaluation suite.

Every hand-over has a contract. One function has more than sixty lines: it is the list of stages in their order, a
call each, and reads as that.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.check_contract import check_contract
from flows.running.run import Run
from flows.running.run_step import run_step
from infra.machine.spark import stop_spark
from infra.step import Artifact, R
from tasks.data.chats.collect_chats import collect_chats
from tasks.data.decontamination.decontaminate_documents import decontaminate_documents
from tasks.data.deduplication.deduplicate_documents import deduplicate_documents
from tasks.data.deduplication.earlier_documents import list_earlier_documents
from tasks.data.deduplication.remove_semantic_duplicates import remove_semantic_duplicates
from tasks.data.deduplication.split_documents import split_documents
from tasks.data.extraction.extract_documents import extract_documents
from tasks.data.extraction.remove_boilerplate import remove_boilerplate
from tasks.data.filtering.filter_documents import filter_documents
from tasks.data.privacy.mask_personal_data import mask_personal_data
from tasks.data.problems.synthesize_problems import synthesize_problems
from tasks.data.repositories.concatenate_repositories import concatenate_repositories
from tasks.data.scoring.score_documents import score_documents
from tasks.data.scoring.train_classifiers import train_classifiers
from tasks.data.scoring.train_ngram_model import train_ngram_model
from tasks.data.seeds.request_traces import request_traces
from tasks.data.seeds.vary_problems import vary_problems
from tasks.data.seeds.verify_solutions import verify_solutions
from tasks.data.shards.shard_chats import shard_chats
from tasks.data.shards.shard_documents import shard_documents
from tasks.data.shards.shard_validation import shard_validation
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import SourceListing
from tasks.data.tokenizer.train_tokenizer import train_tokenizer
from tasks.data.validate_contract import ContractResult
from tasks.evaluation.select_evaluation_items import select_evaluation_items
from tasks.prepared_data import PreparedData


@flow(name="prepare_data", flow_run_name="raw documents to token shards", validate_parameters=False)
def prepare_data(run: Run, sources: SourceListing) -> PreparedData:
    """Prepare the data of a scale; Spark is stopped at the end."""
    recipe, spark = run.scale.data.recipe, run.scale.data.resources
    contracts: dict[str, tuple[Artifact[Any], Artifact[ContractResult]]] = {}

    def contracted(artifact: Artifact[R], name: str) -> Artifact[R]:
        contracts[name] = (artifact, check_contract(run, artifact, name))
        return artifact

    ingested = contracted(run_step(run, ingest_documents, sources=sources, recipe=recipe.ingest, resources=spark), "ingested")
    extracted = contracted(run_step(run, extract_documents, records=ingested, recipe=recipe.extract, resources=spark), "extracted")
    clean = contracted(
        run_step(run, remove_boilerplate, documents=extracted, recipe=recipe.boilerplate, resources=spark), "boilerplate_free"
    )
    classifiers = run_step(run, train_classifiers, sources=sources, recipe=recipe.classifiers)
    ngram_model = run_step(run, train_ngram_model, sources=sources, documents=clean, recipe=recipe.ngram_training, resources=spark)
    scored = contracted(
        run_step(
            run, score_documents, documents=clean, classifiers=classifiers, ngram_model=ngram_model, recipe=recipe.language,
            resources=spark,
        ),
        "scored",
    )  # fmt: skip
    earlier = list_earlier_documents(recipe.deduplicate.previous)
    deduplicated = contracted(
        run_step(run, deduplicate_documents, documents=scored, previous=earlier, recipe=recipe.deduplicate, resources=spark), "deduplicated"
    )
    distinct = contracted(
        run_step(run, remove_semantic_duplicates, documents=deduplicated, recipe=recipe.semantic, resources=spark), "distinct"
    )
    split = contracted(run_step(run, split_documents, documents=distinct, recipe=recipe.split, resources=spark), "split")
    filtered = contracted(run_step(run, filter_documents, documents=split, recipe=recipe.filter, resources=spark), "filtered")
    masked = contracted(run_step(run, mask_personal_data, documents=filtered, recipe=recipe.personal_data, resources=spark), "masked")
    problems = contracted(run_step(run, synthesize_problems, recipe=recipe.synthesize), "problems")
    decontaminated = contracted(
        run_step(
            run, decontaminate_documents, documents=masked, synthetic=problems, ingested=ingested,
            recipe=recipe.decontaminate, resources=spark,
        ),
        "decontaminated",
    )  # fmt: skip
    repositories = contracted(
        run_step(run, concatenate_repositories, documents=decontaminated, recipe=recipe.repositories, resources=spark), "repositories"
    )
    solutions = contracted(run_step(run, verify_solutions, sources=sources), "solutions")
    variations = contracted(run_step(run, vary_problems, sources=sources, recipe=recipe.seed_variations), "variations")
    teacher = recipe.teacher
    traces = (
        contracted(run_step(run, request_traces, sources=sources, recipe=teacher.request, resources=teacher.limits), "traces")
        if teacher.request.base_url
        else None
    )
    chats = contracted(
        run_step(
            run, collect_chats, sources=sources, synthetic=problems, ingested=ingested, solutions=solutions, variations=variations,
            traces=traces, recipe=recipe.chat_collection, resources=spark,
        ),
        "chats",
    )  # fmt: skip
    tokenizer = contracted(run_step(run, train_tokenizer, documents=decontaminated, recipe=recipe.tokenizer, resources=spark), "tokenizer")
    texts = {"documents": decontaminated, "repositories": repositories, "tokenizer": tokenizer}
    shards = contracted(run_step(run, shard_documents, recipe=recipe.shards, resources=spark, **texts), "shards")
    validation = contracted(run_step(run, shard_validation, resources=spark, **texts), "validation")
    chat_shards = contracted(
        run_step(run, shard_chats, chats=chats, tokenizer=tokenizer, recipe=recipe.shards, resources=spark), "chat_shards"
    )
    suite = contracted(
        run_step(
            run, select_evaluation_items, documents=decontaminated, repositories=repositories, problems=problems, sources=sources,
            tokenizer=tokenizer, recipe=run.scale.evaluation.recipe,
        ),
        "evaluation_suite",
    )  # fmt: skip
    stop_spark()
    return PreparedData(
        ingested, extracted, clean, classifiers, ngram_model, scored, deduplicated, distinct, split, filtered, masked, problems,
        solutions, variations, traces, decontaminated, chats, repositories, tokenizer, shards, validation, chat_shards, suite, contracts,
    )  # fmt: skip
