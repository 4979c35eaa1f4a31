"""The prepared data of a small run for the report: real records, and data files with texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields

import pyarrow as pa
import pyarrow.parquet as pq

from infra.step import Artifact, Output, Record, Step
from infra.storage.store import Store
from tasks.data.chats.collect_chats import CollectedChats
from tasks.data.contamination.measure_contamination import MeasuredContamination
from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
from tasks.data.deduplication.deduplicate_documents import DeduplicatedDocuments
from tasks.data.deduplication.duplicate_clusters import DuplicateCluster
from tasks.data.deduplication.remove_semantic_duplicates import DistinctDocuments
from tasks.data.deduplication.split_documents import SplitDocuments
from tasks.data.extraction.extract_documents import ExtractedDocuments
from tasks.data.extraction.remove_boilerplate import BoilerplateFreeDocuments
from tasks.data.filtering.filter_documents import FilteredDocuments
from tasks.data.privacy.mask_personal_data import MaskedDocuments
from tasks.data.problems.synthesize_problems import SynthesizedProblems
from tasks.data.prompts.collect_prompts import CollectedPrompts
from tasks.data.repositories.concatenate_repositories import ConcatenatedRepositories
from tasks.data.scoring.score_documents import ScoredDocuments
from tasks.data.scoring.train_classifiers import TrainedClassifiers
from tasks.data.scoring.train_ngram_model import TrainedNgramModel
from tasks.data.seeds.vary_problems import VariedProblems
from tasks.data.seeds.verify_solutions import VerifiedSolutions
from tasks.data.shards.shard_chats import ChatShards
from tasks.data.shards.shard_documents import TokenShards
from tasks.data.sources.ingest_documents import IngestedDocuments
from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer
from tasks.data.validate_contract import ContractResult
from tasks.prepared_data import PreparedData, PreparedDocuments
from tests.support.evaluation_fakes import commit, evaluation_suite

WORDS = "a text of which the report shows the beginning <b>and nothing else</b> "
REASONS = {
    "deduplicate_documents": {"exact": 60, "near": 39},
    "remove_boilerplate": {},
    "remove_semantic_duplicates": {},
    "filter_documents": {"too_few_words": 48, "blocked": 3},
    "decontaminate_documents": {"overlap": 2},
}
SHARDS = TokenShards(
    num_documents=906,
    num_tokens=2500,
    shards=("web-00000",),
    domains={"web-00000": "web"},
    tokens_by_domain={"web": 2100, "code": 400},
)
RECORDS: dict[str, Record] = {
    "ingested": IngestedDocuments(
        num_sources=9,
        num_documents=1000,
        num_bytes=5000,
        num_evaluation_documents=3,
        num_unsampled_documents=5,
        rejected={"not_utf8 <&>": 7},
        num_lost_bytes=0,
        documents_by_domain={"web": 700, "code": 300},
        bytes_by_domain={"web": 4000, "code": 1000},
    ),
    "decontaminated": DecontaminatedDocuments(
        num_documents=971,
        num_bytes=4800,
        num_protected_items=11,
        num_common_runs=0,
        dropped=REASONS["decontaminate_documents"],
        train_bytes_by_domain={"web": 70, "code": 9},
        held_out_bytes_by_domain={"web": 8},
        num_prompts=79,
        prompts_by_domain={"synthetic": 59, "math": 20},
        num_dropped_prompts=1,
    ),
    "deduplicated": DeduplicatedDocuments(
        num_documents=901,
        num_bytes=4500,
        num_verified_pairs=39,
        num_bands=20,
        num_rows=6,
        dropped=REASONS["deduplicate_documents"],
        largest_clusters=(
            DuplicateCluster(
                collection="shop",
                num_removed=30,
                num_documents=400,
                kept_id="0" * 16,
                kept="A cup <b>1</b>",
                removed_id="1" * 16,
                removed="A cup <b>2</b>",
            ),
        ),
    ),
    "problems": SynthesizedProblems(
        num_documents=120,
        num_bytes=900,
        num_training_problems=3000,
        num_evaluation_problems=300,
        num_chats=250,
        num_prompts=80,
        num_tasks=0,
        num_held_out_tasks=0,
        num_safety_requests=120,
        num_held_out_problems=0,
        training_problems_by_family={"arithmetic": 3000},
        rejected={},
    ),
    "prompts": CollectedPrompts(
        num_prompts=80,
        prompts_by_domain={"synthetic": 60, "math": 20},
        prompts_by_kind={"exact": 60, "math": 20},
        rejected={"no_answer": 3},
    ),
    "solutions": VerifiedSolutions(
        num_seeds=77,
        num_without_solution=0,
        num_chats=70,
        chats_by_collection={"math": 70},
        rejected={"wrong_answer": 7},
    ),
    "variations": VariedProblems(
        num_seeds=77,
        num_varied_seeds=30,
        num_chats=60,
        chats_by_collection={"math": 60},
        rejected={"unused_number": 47},
    ),
    "chats": CollectedChats(
        num_sources=1,
        num_chats=300,
        num_bytes=9000,
        chats_by_collection={"synthetic": 250, "sft/*": 50},
        training_chats=285,
        validation_chats=15,
        dropped={"exact_duplicate": 4},
        num_masked_chats=2,
        masked={"email": 2},
        rejected={"unknown_role": 1},
    ),
    "tokenizer": TrainedTokenizer(
        num_tokens=356,
        num_ordinary_tokens=320,
        special_ids={},
        tokenizer_digest="t" * 64,
        num_sample_documents=12,
        num_sample_chars=4567,
    ),
    "shards": SHARDS,
    "validation": SHARDS,
    "repositories": ConcatenatedRepositories(
        num_documents=7, num_bytes=600, num_repositories=5, num_files=61, train_bytes=550, held_out_bytes=50
    ),
    "chat_shards": ChatShards(
        num_documents=285,
        num_tokens=800,
        shards=("chat-00000",),
        domains={"chat-00000": "chat"},
        tokens_by_domain={"chat": 800},
        num_trained_tokens=333,
    ),
    "split": SplitDocuments(
        num_documents=901,
        num_bytes=4500,
        train_by_domain={"web": 800},
        validation_by_domain={"web": 40},
        test_by_domain={"web": 61},
    ),
    "extracted": ExtractedDocuments(
        num_documents=1000,
        num_bytes=5000,
        num_records=1000,
        dropped={},
        documents_by_domain={"web": 700, "code": 300},
        bytes_by_domain={"web": 4000, "code": 1000},
    ),
    "boilerplate_free": BoilerplateFreeDocuments(
        num_documents=1000,
        num_bytes=5000,
        dropped=REASONS["remove_boilerplate"],
        num_paragraphs=3,
        num_changed=20,
        num_bytes_removed=400,
    ),
    "scored": ScoredDocuments(
        num_documents=1000,
        num_bytes=5000,
        documents_by_language={"en": 990, "": 10},
        unscored={"quality": 10},
        quantiles={"quality": {"0.1": 0.25, "0.5": 0.625}},
    ),
    "distinct": DistinctDocuments(
        num_documents=901,
        num_bytes=4500,
        dropped=REASONS["remove_semantic_duplicates"],
        num_clusters=2,
        num_pairs=0,
        num_sampled=901,
    ),
    "masked": MaskedDocuments(num_documents=853, num_bytes=4100, num_masked_documents=2, masked={"email": 3}),
    "filtered": FilteredDocuments(
        num_documents=853,
        num_bytes=4100,
        dropped=REASONS["filter_documents"],
        unscored={"quality": 3},
        documents_by_bucket={-1: 3, 0: 400, 1: 450},
        bucket_floors=(0.5,),
    ),
    "classifiers": TrainedClassifiers(
        kinds=(), num_records={}, auc={}, unused={}, flagged_sentences={"counter_speech": 0.417}
    ),
    "ngram_model": TrainedNgramModel(languages=("en",), too_small={}, num_known_references=0, reference_rejected={}),
}
"""By the names in PreparedData."""
KEPT = f"{7:016x}"
"""The document in whose favour near-duplicates were dropped."""
DOCUMENTS = {
    "extracted": ("extract_documents", range(1000)),
    "boilerplate_free": ("remove_boilerplate", range(1000)),
    "scored": ("score_documents", range(1000)),
    "deduplicated": ("deduplicate_documents", range(901)),
    "distinct": ("remove_semantic_duplicates", range(901)),
    "split": ("split_documents", range(2000)),
    "filtered": ("filter_documents", range(853)),
    "masked": ("mask_personal_data", range(853)),
    "problems": ("synthesize_problems", range(900, 1020)),
    "decontaminated": ("decontaminate_documents", range(851)),
}
"""Step and numbers of the documents that the report reads."""
WITHOUT_FILES = {
    "classifiers": "train_classifiers",
    "ngram_model": "train_ngram_model",
    "prompts": "collect_prompts",
    "solutions": "verify_solutions",
    "variations": "vary_problems",
    "chats": "collect_chats",
    "repositories": "concatenate_repositories",
    "shards": "shard_documents",
    "validation": "shard_validation",
    "chat_shards": "shard_chats",
}
"""Step of what the report reads only the record of."""


def toy(name: str, record: Record, write: Callable[[Output], object], evidence: tuple[str, ...] = ()) -> Step:
    """A step of the given name that writes what it is told and returns a real record; `start` is only recorded."""

    def function(*, output: Output, start: object = None) -> Record:
        write(output)
        return record

    function.__name__ = name
    function.__annotations__ = {"return": type(record).__name__}
    # A step's record type is looked up by name among the globals of its function.
    function.__globals__.setdefault(type(record).__name__, type(record))
    return Step(function, ("hf/*",) if evidence else ("*",), evidence, (), (), ())


def documents(
    store: Store, name: str, record: Record, ids: range, extra: Callable[[Output], None] = lambda output: None
) -> Artifact:
    """An artifact with documents of these numbers, and a dropped.parquet where the step has reasons."""

    def write(output: Output) -> None:
        rows = [
            {"id": f"{number:016x}", "url": f"https://toy.example/{number}", "content_digest": f"{number:064x}"}
            | {"text": f"{number}: {WORDS * 8}"}
            for number in ids
        ]
        pq.write_table(pa.Table.from_pylist(rows), output.path("documents/part-00000.parquet"))
        extra(output)
        if name in REASONS:
            reasons = [reason for reason, count in REASONS[name].items() for _ in range(count)]
            dropped = [
                {"id": f"{ids.stop + number:016x}", "reason": reason, "kept_id": KEPT if reason == "near" else ""}
                for number, reason in enumerate(reasons)
            ]
            schema = pa.schema([(column, pa.string()) for column in ("id", "reason", "kept_id")])
            pq.write_table(pa.Table.from_pylist(dropped, schema=schema), output.path("dropped.parquet"))

    return commit(store, toy(name, record, write), name)


def _sources(output: Output) -> None:
    rejected = [
        {"source": "bad/<&>.txt", "offset": number, "reason": "not_utf8 <&>", "detail": "byte 3"} for number in range(7)
    ]
    pq.write_table(pa.Table.from_pylist(rejected), output.path("rejected.parquet"))
    rows = [
        {
            "name": f"{collection}/{number}",
            "sha256": f"{number:064x}",
            "size": 1000 * (number + 1),
            "role": role,
            "format": "text",
            "domain": domain,
            "lang": "en",
            "licence": licence,
            "collection": collection,
        }
        for collection, role, domain, licence in (
            ("python", "pretrain", "code", "PSF-2.0"),
            ("packages", "pretrain", "web", "MIT | Apache-2.0"),
            ("bench/**", "evaluation", "web", ""),
        )
        for number in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), output.path("sources.parquet"))


def _fertility(output: Output) -> None:
    rows = [
        {
            "tokenizer": name,
            "domain": domain,
            "language": language,
            "num_bytes": 5000,
            "tokens_per_word": 1.5,
            "bytes_per_token": 3.25,
            "vocabulary_share": 0.9,
        }
        for name in ("compared", "ours")
        for domain, language in (("*", "*"), ("web", "*"), ("*", "en"), ("web", "en"))
    ]
    pq.write_table(pa.Table.from_pylist(rows), output.path("tokenizer_report.parquet"))


def reported_data(store: Store) -> PreparedData:
    ingested = documents(store, "ingest_documents", RECORDS["ingested"], range(2000), _sources)
    ingested.manifest.identity["inputs"]["sources"] = "5" * 64
    given = {name: documents(store, step, RECORDS[name], ids) for name, (step, ids) in DOCUMENTS.items()}
    given |= {name: _without_files(store, step, RECORDS[name]) for name, step in WITHOUT_FILES.items()}
    given["filtered"].manifest.identity["inputs"]["blocked"] = None
    given["passages"] = None
    walk = {each.name: given.pop(each.name) for each in fields(PreparedDocuments)}
    return PreparedData(
        ingested=ingested,
        documents=PreparedDocuments(**walk),
        **given,
        traces=None,
        preferences=None,
        tokenizer=commit(store, toy("train_tokenizer", RECORDS["tokenizer"], _fertility), "train_tokenizer"),
        suite=evaluation_suite(store),
        contamination=contamination(store, 0),
        contracts={name: (ingested, _checked(store, name)) for name in ("ingested", "deduplicated", "shards")},
    )


def contamination(store: Store, num_contaminated: int) -> Artifact[MeasuredContamination]:
    """What was measured where training data quotes that many of 60 items of a benchmark."""
    record = MeasuredContamination(
        num_items=71,
        num_contaminated_items=num_contaminated,
        num_sources=2,
        worst_source="bench/quiz.jsonl",
        worst_source_items=60,
        worst_source_contaminated=num_contaminated,
        contaminated_by_kind={"conversation": num_contaminated} if num_contaminated else {},
    )
    return commit(store, toy("measure_contamination", record, lambda output: output.path("empty").touch()), str(record))


def _without_files(store: Store, name: str, record: Record) -> Artifact:
    return commit(store, toy(name, record, lambda output: output.path("empty").touch()), name)


def _checked(store: Store, name: str) -> Artifact:
    """The result of an accepted contract."""
    finding = {
        "table": "documents/*.parquet",
        "expectation": "unique",
        "arguments": {"column": "id"},
        "observed": "1,000 rows",
    }
    result = ContractResult(contract=name, num_rows=1000, num_expectations=11)
    write = lambda output: output.path("findings.json").write_text(json.dumps([finding]))  # noqa: E731
    return commit(store, toy("validate_contract", result, write), f"contract {name}")
