"""Data: prepares documents from the sources in named steps, to token shards and an evaluation suite.

Every hand-over has a contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import flow
from pydantic import BaseModel

from flows.check_contract import check_contract
from flows.running.branches import Branches
from flows.running.run_step import run_step
from infra.machine.spark import stop_spark
from infra.step import Artifact, R, Step
from tasks.data.chats.collect_chats import CollectedChats, collect_chats
from tasks.data.contamination.measure_contamination import MeasuredContamination, measure_contamination
from tasks.data.decontamination.decontaminate_documents import decontaminate_documents
from tasks.data.deduplication.deduplicate_documents import deduplicate_documents
from tasks.data.deduplication.earlier_documents import list_earlier_documents
from tasks.data.deduplication.remove_semantic_duplicates import remove_semantic_duplicates
from tasks.data.deduplication.split_documents import split_documents
from tasks.data.extraction.extract_documents import extract_documents
from tasks.data.extraction.remove_boilerplate import remove_boilerplate
from tasks.data.filtering.blocked_documents import read_block_list
from tasks.data.filtering.filter_documents import filter_documents
from tasks.data.preferences.collect_preferences import collect_preferences
from tasks.data.privacy.mask_personal_data import mask_personal_data
from tasks.data.problems.synthesize_problems import synthesize_problems
from tasks.data.prompts.collect_prompts import collect_prompts
from tasks.data.prompts.sample_passages import sample_passages
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
from tasks.data.tokenizer.import_tokenizer import import_tokenizer
from tasks.data.tokenizer.train_tokenizer import train_tokenizer
from tasks.data.validate_contract import ContractResult
from tasks.evaluation.select_evaluation_items import EvaluationSuite, select_evaluation_items
from tasks.prepared_data import PreparedData, PreparedDocuments

if TYPE_CHECKING:
    from configs.schema import TokenizerRecipe
    from flows.running.run import Run
    from tasks.data.preferences.collect_preferences import CollectedPreferences
    from tasks.data.privacy.mask_personal_data import MaskedDocuments
    from tasks.data.problems.synthesize_problems import SynthesizedProblems
    from tasks.data.prompts.sample_passages import SampledPassages
    from tasks.data.seeds.request_traces import RequestedTraces
    from tasks.data.seeds.verify_solutions import VerifiedSolutions
    from tasks.data.sources.ingest_documents import IngestedDocuments
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer

Artifacts = dict[str, Any]
"""Artifacts by their names in PreparedData or PreparedDocuments; None where a step is left out."""


class DataStages:
    """Steps of one run, each with the contract of its output."""

    def __init__(self, run: Run, sources: SourceListing) -> None:
        self.run, self.recipe, self.spark = run, run.scale.data.recipe, run.scale.data.resources
        self.sources = sources
        self.contracts: dict[str, tuple[Artifact[Any], Artifact[ContractResult]]] = {}

    def on_spark(self, step: Step[R], contract: str, recipe: BaseModel | None, **inputs: Any) -> Artifact[R]:
        return self._contracted(run_step(self.run, step, recipe=recipe, resources=self.spark, **inputs), contract)

    def on_driver(
        self, step: Step[R], contract: str, recipe: BaseModel | None, resources: BaseModel | None = None, **inputs: Any
    ) -> Artifact[R]:
        return self._contracted(run_step(self.run, step, recipe=recipe, resources=resources, **inputs), contract)

    def _contracted(self, artifact: Artifact[R], name: str) -> Artifact[R]:
        self.contracts[name] = (artifact, check_contract(self.run, artifact, name))
        return artifact


@flow(name="prepare_data", flow_run_name="raw documents to token shards", validate_parameters=False)
def prepare_data(run: Run, sources: SourceListing, reads_documents: bool, reads_pairs: bool) -> PreparedData:
    """Prepare the data of a scale; Spark is stopped at the end. Without `reads_documents`, the run's phases read only
    conversations: nothing is done with documents. With `reads_pairs`, preference pairs are collected."""
    stages = DataStages(run, sources)
    given = (
        stages.on_driver(import_tokenizer, "tokenizer", _tokenizer(run)) if _tokenizer(run).kind == "given" else None
    )
    # Executors and a teacher compute elsewhere: on this machine one step computes at a time.
    waits = not stages.spark.is_local or bool(stages.recipe.teacher.request.base_url)
    with Branches(run, are_side_by_side=waits) as branches:
        traces = branches.begin("teacher", lambda: ask_teacher(stages))
        reading = branches.begin("sources", lambda: read_sources(stages, reads_documents))
        cleaning = branches.begin(
            "documents", lambda: clean_documents(stages, branches, reading.result()) if reads_documents else {}
        )
        problems = stages.on_driver(synthesize_problems, "problems", stages.recipe.synthesize)
        solutions = stages.on_driver(verify_solutions, "solutions", None, sources=sources)
        ingested = reading.result()
        deciding = branches.begin(
            "decontamination",
            lambda: decontaminate(stages, ingested, cleaning.result(), problems, solutions) if reads_documents else {},
        )
        talking = branches.begin(
            "conversations", lambda: make_conversations(stages, ingested, problems, solutions, traces.result())
        )
        pairing = branches.begin(
            "preferences", lambda: collect_pairs(stages, ingested, problems) if reads_pairs else None
        )
        whole = deciding.result()
        tokenizer = given or stages.on_spark(
            train_tokenizer, "tokenizer", _tokenizer(run), documents=whole["decontaminated"]
        )
        sharding = branches.begin("shards", lambda: shard_texts(stages, whole, tokenizer) if reads_documents else {})
        chats = talking.result()["chats"]
        chat_shards = stages.on_spark(
            shard_chats, "chat_shards", stages.recipe.shards, chats=chats, tokenizer=tokenizer
        )
        suite = select_items(stages, whole, problems, None if reads_documents else chats, tokenizer)
        contamination = look_for_items(stages, ingested, problems, whole, chats, pairing.result())
    stop_spark()
    documents = {**cleaning.result(), **whole, **sharding.result()}
    return PreparedData(
        ingested=ingested,
        problems=problems,
        documents=PreparedDocuments(**documents) if reads_documents else None,
        **talking.result(),
        preferences=pairing.result(),
        tokenizer=tokenizer,
        chat_shards=chat_shards,
        suite=suite,
        contamination=contamination,
        contracts=stages.contracts,
    )


def _tokenizer(run: Run) -> TokenizerRecipe:
    return run.scale.data.recipe.tokenizer


def read_sources(stages: DataStages, reads_documents: bool) -> Artifact[IngestedDocuments]:
    """The documents of the sources, and what may not be trained on. A run that reads only conversations has no
    documents here, and no contract on them."""
    recipe = stages.recipe.ingest
    if reads_documents:
        return stages.on_spark(ingest_documents, "ingested", recipe, sources=stages.sources)
    return run_step(stages.run, ingest_documents, recipe=recipe, resources=stages.spark, sources=stages.sources)


def extract_texts(stages: DataStages, ingested: Artifact[IngestedDocuments]) -> Artifacts:
    """The main text of all sources, and a model of what is usual in it."""
    run, recipe = stages.run, stages.recipe
    extracted = stages.on_spark(extract_documents, "extracted", recipe.extract, records=ingested)
    clean = stages.on_spark(remove_boilerplate, "boilerplate_free", recipe.boilerplate, documents=extracted)
    ngram_model = run_step(
        run,
        train_ngram_model,
        sources=stages.sources,
        documents=clean,
        recipe=recipe.ngram_training,
        resources=stages.spark,
    )
    return {"extracted": extracted, "boilerplate_free": clean, "ngram_model": ngram_model}


def clean_documents(stages: DataStages, branches: Branches, ingested: Artifact[IngestedDocuments]) -> Artifacts:
    """From the sources to documents worth training on, without personal data."""
    run, recipe = stages.run, stages.recipe
    extracting = branches.begin("texts", lambda: extract_texts(stages, ingested))
    classifiers = run_step(run, train_classifiers, sources=stages.sources, recipe=recipe.classifiers)
    texts = extracting.result()
    scored = stages.on_spark(
        score_documents,
        "scored",
        recipe.language,
        documents=texts["boilerplate_free"],
        classifiers=classifiers,
        ngram_model=texts["ngram_model"],
    )
    earlier = list_earlier_documents(recipe.deduplicate.previous)
    deduplicated = stages.on_spark(
        deduplicate_documents, "deduplicated", recipe.deduplicate, documents=scored, previous=earlier
    )
    distinct = stages.on_spark(remove_semantic_duplicates, "distinct", recipe.semantic, documents=deduplicated)
    split = stages.on_spark(split_documents, "split", recipe.split, documents=distinct)
    blocked = read_block_list(run.home.root, recipe.filter.block_list)
    filtered = stages.on_spark(
        filter_documents,
        "filtered",
        recipe.filter,
        documents=split,
        extracted=texts["extracted"] if blocked and blocked.digests else None,
        blocked=blocked,
    )
    masked = stages.on_spark(mask_personal_data, "masked", recipe.personal_data, documents=filtered)
    return {
        **texts,
        "classifiers": classifiers,
        "scored": scored,
        "deduplicated": deduplicated,
        "distinct": distinct,
        "split": split,
        "filtered": filtered,
        "masked": masked,
    }


def decontaminate(
    stages: DataStages,
    ingested: Artifact[IngestedDocuments],
    clean: Artifacts,
    problems: Artifact[SynthesizedProblems],
    solutions: Artifact[VerifiedSolutions],
) -> Artifacts:
    """All documents and prompts without what evaluation asks, with verified problems; then whole repositories."""
    recipe = stages.recipe
    passages = sample_texts(stages, clean["masked"])
    prompts = stages.on_driver(
        collect_prompts,
        "prompts",
        recipe.prompts,
        sources=stages.sources,
        synthetic=problems,
        solutions=solutions,
        passages=passages,
    )
    decontaminated = stages.on_spark(
        decontaminate_documents,
        "decontaminated",
        recipe.decontaminate,
        documents=clean["masked"],
        synthetic=problems,
        prompts=prompts,
        ingested=ingested,
    )
    repositories = stages.on_spark(
        concatenate_repositories, "repositories", recipe.repositories, documents=decontaminated
    )
    return {"passages": passages, "prompts": prompts, "decontaminated": decontaminated, "repositories": repositories}


def sample_texts(stages: DataStages, documents: Artifact[MaskedDocuments]) -> Artifact[SampledPassages] | None:
    """Passages of the documents, which searches are about; None where a run asks no search about them."""
    recipe = stages.recipe
    if not recipe.prompts.num_document_searches:
        return None
    return stages.on_spark(sample_passages, "passages", recipe.passage_sample, documents=documents)


def ask_teacher(stages: DataStages) -> Artifact[RequestedTraces] | None:
    """A teacher's answers to seed problems; None where none is configured."""
    teacher = stages.recipe.teacher
    if not teacher.request.base_url:
        return None
    return stages.on_driver(request_traces, "traces", teacher.request, teacher.limits, sources=stages.sources)


def collect_pairs(
    stages: DataStages, ingested: Artifact[IngestedDocuments], problems: Artifact[SynthesizedProblems]
) -> Artifact[CollectedPreferences]:
    """Preference pairs of the sources and of made problems."""
    collection = stages.recipe.preference_collection
    return stages.on_spark(
        collect_preferences, "preferences", collection, sources=stages.sources, synthetic=problems, ingested=ingested
    )


def make_conversations(
    stages: DataStages,
    ingested: Artifact[IngestedDocuments],
    problems: Artifact[SynthesizedProblems],
    solutions: Artifact[VerifiedSolutions],
    traces: Artifact[RequestedTraces] | None,
) -> Artifacts:
    """Conversations of the sources, of verified solutions, of variations, and of a teacher's traces."""
    recipe = stages.recipe
    variations = stages.on_driver(vary_problems, "variations", recipe.seed_variations, sources=stages.sources)
    chats = stages.on_spark(
        collect_chats,
        "chats",
        recipe.chat_collection,
        sources=stages.sources,
        synthetic=problems,
        ingested=ingested,
        solutions=solutions,
        variations=variations,
        traces=traces,
    )
    return {"solutions": solutions, "variations": variations, "traces": traces, "chats": chats}


def shard_texts(stages: DataStages, documents: Artifacts, tokenizer: Artifact[TrainedTokenizer]) -> Artifacts:
    """Token shards of documents and repositories: to train on, and held out."""
    texts = {"documents": documents["decontaminated"], "repositories": documents["repositories"]}
    shards = stages.on_spark(shard_documents, "shards", stages.recipe.shards, tokenizer=tokenizer, **texts)
    validation = stages.on_spark(shard_validation, "validation", None, tokenizer=tokenizer, **texts)
    return {"shards": shards, "validation": validation}


def select_items(
    stages: DataStages,
    documents: Artifacts,
    problems: Artifact[SynthesizedProblems],
    chats: Artifact[CollectedChats] | None,
    tokenizer: Artifact[TrainedTokenizer],
) -> Artifact[EvaluationSuite]:
    """What checkpoints are asked; `chats` where the run reads only conversations."""
    return stages.on_spark(
        select_evaluation_items,
        "evaluation_suite",
        stages.run.scale.evaluation.recipe,
        problems=problems,
        sources=stages.sources,
        documents=documents.get("decontaminated"),
        repositories=documents.get("repositories"),
        chats=chats,
        tokenizer=tokenizer,
    )


def look_for_items(
    stages: DataStages,
    ingested: Artifact[IngestedDocuments],
    problems: Artifact[SynthesizedProblems],
    documents: Artifacts,
    chats: Artifact[CollectedChats],
    preferences: Artifact[CollectedPreferences] | None,
) -> Artifact[MeasuredContamination]:
    """What of the evaluation is still in training text, after every step that makes some."""
    return run_step(
        stages.run,
        measure_contamination,
        ingested=ingested,
        synthetic=problems,
        documents=documents.get("decontaminated"),
        repositories=documents.get("repositories"),
        chats=chats,
        preferences=preferences,
        recipe=stages.recipe.decontaminate,
        resources=stages.spark,
    )
