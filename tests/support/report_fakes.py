"""A small run for the report: real records, real items of toy models, data files with texts, metrics and rollouts of
four phases."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq

from configs.schema import EvaluationResources, GateRecipe, MarginRecipe, ReleaseRecipe, ServingResources
from infra.step import Artifact, Output, Record, Step
from infra.storage.store import Store
from tasks.data.chats.collect_chats import CollectedChats
from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
from tasks.data.deduplication.deduplicate_documents import DeduplicatedDocuments
from tasks.data.deduplication.duplicate_clusters import DuplicateCluster
from tasks.data.deduplication.remove_semantic_duplicates import DistinctDocuments
from tasks.data.deduplication.split_documents import SplitDocuments
from tasks.data.extraction.extract_documents import ExtractedDocuments
from tasks.data.extraction.remove_boilerplate import BoilerplateFreeDocuments
from tasks.data.filtering.filter_documents import FilteredDocuments
from tasks.data.packing.pack_phase import PackedPhase
from tasks.data.privacy.mask_personal_data import MaskedDocuments
from tasks.data.problems.synthesize_problems import SynthesizedProblems
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
from tasks.evaluation.decide_gate import decide_gate
from tasks.evaluation.evaluate_checkpoint import evaluate_checkpoint
from tasks.prepared_data import PreparedData
from tasks.release.convert_to_gguf import convert_to_gguf
from tasks.release.decide_quantization import decide_quantization
from tasks.release.evaluate_gguf import evaluate_gguf
from tasks.report.report_inputs import ReportedPhase, ReportedPhases
from tasks.report.write_report import Report, write_report
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tests.support.evaluation_fakes import RECIPE, commit, evaluation_suite, toy_checkpoint_step

RELEASE = ReleaseRecipe(
    gguf_types=("F32", "Q8_0"),
    smoke_prompts=("The",),
    smoke_prompt_tokens=8,
    smoke_new_tokens=4,
    smoke_min_margin=0.01,
    max_quantization_bits_per_byte=0.05,
    num_quantization_documents=2,
    max_quantization_document_tokens=8,
)
SERVING = ServingResources(host="127.0.0.1", port=0, context_length=256, num_threads=1, startup_timeout_seconds=30)
MARGINS = MarginRecipe(
    bits_per_byte=0.5, domain_bits_per_byte=9.0, arithmetic_accuracy=1.0, pass_at_1=1.0, choice_accuracy=1.0
)
GATE = GateRecipe(
    max_bits_per_byte=12.0,
    min_arithmetic_accuracy=0.0,
    min_pass_at_1=0.0,
    min_choice_accuracy=0.0,
    min_distinct_answer_share=0.0,
    own_figure="none",
    start=MARGINS,
    champion=MARGINS,
    max_expert_load=9.0,
    max_expert_cv=9.0,
)
STEPS = {"pretrain_general": 60, "mid_reasoning": 30, "sft": 30, "rl_reasoning": 20}
TOKENS_PER_STEP = 8192
WORDS = "a text of which the report shows the beginning <b>and nothing else</b> "
REASONS = {
    "deduplicate_documents": {"exact": 60, "near": 39},
    "remove_boilerplate": {},
    "remove_semantic_duplicates": {},
    "filter_documents": {"too_few_words": 48},
    "decontaminate_documents": {"overlap": 2},
}


def toy(name: str, record: Record, write: Callable[[Output], object], evidence: tuple[str, ...] = ()) -> Step:
    """A step of the given name that writes the given files and returns a real record."""

    def function(*, output: Output) -> Record:
        write(output)
        return record

    function.__name__ = name
    function.__annotations__ = {"return": type(record).__name__}
    return Step(function, ("hf/*",) if evidence else ("*",), evidence, (), (), ())


def documents(
    store: Store, name: str, record: Record, ids: range, extra: Callable[[Output], None] = lambda output: None
) -> Artifact:
    """An artifact with documents of these numbers, and a dropped.parquet where the step has reasons."""

    def write(output: Output) -> None:
        rows = [{"id": f"{number:016x}", "text": f"{number}: {WORDS * 8}"} for number in ids]
        pq.write_table(pa.Table.from_pylist(rows), output.path("documents/part-00000.parquet"))
        extra(output)
        if name in REASONS:
            reasons = [reason for reason, count in REASONS[name].items() for _ in range(count)]
            dropped = [
                {"id": f"{ids.stop + number:016x}", "reason": reason, "kept_id": "k" if reason == "near" else ""}
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
    ingested = IngestedDocuments(
        num_sources=9,
        num_documents=1000,
        num_bytes=5000,
        num_evaluation_documents=3,
        num_unsampled_documents=5,
        rejected={"not_utf8 <&>": 7},
        num_lost_bytes=0,
        documents_by_domain={"web": 700, "code": 300},
        bytes_by_domain={"web": 4000, "code": 1000},
    )
    decontaminated = DecontaminatedDocuments(
        num_documents=971,
        num_bytes=4800,
        num_protected_items=11,
        num_common_runs=0,
        dropped=REASONS["decontaminate_documents"],
        train_bytes_by_domain={"web": 70, "code": 9},
        held_out_bytes_by_domain={"web": 8},
        num_prompts=79,
        num_dropped_prompts=1,
    )
    deduplicated = DeduplicatedDocuments(
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
    )
    problems = SynthesizedProblems(
        num_documents=120,
        num_bytes=900,
        num_training_problems=3000,
        num_evaluation_problems=300,
        num_chats=250,
        num_prompts=80,
        num_held_out_problems=0,
        training_problems_by_family={"arithmetic": 3000},
        rejected={},
    )
    solutions = VerifiedSolutions(
        num_seeds=77,
        num_without_solution=0,
        num_chats=70,
        chats_by_collection={"math": 70},
        rejected={"wrong_answer": 7},
    )
    variations = VariedProblems(
        num_seeds=77,
        num_varied_seeds=30,
        num_chats=60,
        chats_by_collection={"math": 60},
        rejected={"unused_number": 47},
    )
    chats = CollectedChats(
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
    )
    tokenizer = TrainedTokenizer(
        num_tokens=356,
        num_ordinary_tokens=320,
        special_ids={},
        tokenizer_digest="t" * 64,
        num_sample_documents=12,
        num_sample_chars=4567,
    )
    shards = TokenShards(
        num_documents=971,
        num_tokens=2500,
        shards=("web-00000",),
        domains={"web-00000": "web"},
        tokens_by_domain={"web": 2100, "code": 400},
    )
    repositories = ConcatenatedRepositories(
        num_documents=7, num_bytes=600, num_repositories=5, num_files=61, train_bytes=550, held_out_bytes=50
    )
    chat_shards = ChatShards(
        num_documents=285,
        num_tokens=800,
        shards=("chat-00000",),
        domains={"chat-00000": "chat"},
        tokens_by_domain={"chat": 800},
        num_trained_tokens=333,
    )
    split = SplitDocuments(
        num_documents=901,
        num_bytes=4500,
        train_by_domain={"web": 800},
        validation_by_domain={"web": 40},
        test_by_domain={"web": 61},
    )
    extracted = ExtractedDocuments(
        num_documents=1000,
        num_bytes=5000,
        num_records=1000,
        dropped={},
        documents_by_domain={"web": 700, "code": 300},
        bytes_by_domain={"web": 4000, "code": 1000},
    )
    boilerplate_free = BoilerplateFreeDocuments(
        num_documents=1000,
        num_bytes=5000,
        dropped=REASONS["remove_boilerplate"],
        num_paragraphs=3,
        num_changed=20,
        num_bytes_removed=400,
    )
    scored = ScoredDocuments(
        num_documents=1000,
        num_bytes=5000,
        documents_by_language={"en": 990, "": 10},
        unscored={"quality": 10},
        quantiles={"quality": {"0.1": 0.25, "0.5": 0.625}},
    )
    distinct = DistinctDocuments(
        num_documents=901,
        num_bytes=4500,
        dropped=REASONS["remove_semantic_duplicates"],
        num_clusters=2,
        num_pairs=0,
        num_sampled=901,
    )
    masked = MaskedDocuments(num_documents=853, num_bytes=4100, num_masked_documents=2, masked={"email": 3})
    filtered = FilteredDocuments(
        num_documents=853,
        num_bytes=4100,
        dropped=REASONS["filter_documents"],
        unscored={"quality": 3},
        documents_by_bucket={-1: 3, 0: 400, 1: 450},
        bucket_floors=(0.5,),
    )

    def plain(name: str, record: Record) -> Artifact:
        return commit(store, toy(name, record, lambda output: output.path("empty").touch()), name)

    findings = [
        {
            "table": "documents/*.parquet",
            "expectation": "unique",
            "arguments": {"column": "id"},
            "observed": "1,000 rows",
        }
    ]
    checked = {
        name: commit(
            store,
            toy(
                "validate_contract",
                ContractResult(contract=name, num_rows=1000, num_expectations=11),
                lambda output: output.path("findings.json").write_text(json.dumps(findings)),
            ),
            f"contract {name}",
        )
        for name in ("ingested", "deduplicated", "shards")
    }
    made = documents(store, "ingest_documents", ingested, range(2000), _sources)
    made.manifest.identity["inputs"]["sources"] = "5" * 64
    return PreparedData(
        ingested=made,
        extracted=documents(store, "extract_documents", extracted, range(1000)),
        boilerplate_free=documents(store, "remove_boilerplate", boilerplate_free, range(1000)),
        classifiers=plain(
            "train_classifiers",
            TrainedClassifiers(
                kinds=(), num_records={}, auc={}, unused={}, flagged_sentences={"counter_speech": 0.417}
            ),
        ),
        ngram_model=plain(
            "train_ngram_model",
            TrainedNgramModel(languages=("en",), too_small={}, num_known_references=0, reference_rejected={}),
        ),
        scored=documents(store, "score_documents", scored, range(1000)),
        distinct=documents(store, "remove_semantic_duplicates", distinct, range(901)),
        masked=documents(store, "mask_personal_data", masked, range(853)),
        deduplicated=documents(store, "deduplicate_documents", deduplicated, range(901)),
        split=documents(store, "split_documents", split, range(2000)),
        filtered=documents(store, "filter_documents", filtered, range(853)),
        problems=documents(store, "synthesize_problems", problems, range(900, 1020)),
        solutions=plain("verify_solutions", solutions),
        variations=plain("vary_problems", variations),
        traces=None,
        decontaminated=documents(store, "decontaminate_documents", decontaminated, range(851)),
        chats=plain("collect_chats", chats),
        repositories=plain("concatenate_repositories", repositories),
        tokenizer=commit(store, toy("train_tokenizer", tokenizer, _fertility), "train_tokenizer"),
        shards=plain("shard_documents", shards),
        validation=plain("shard_validation", shards),
        chat_shards=plain("shard_chats", chat_shards),
        suite=evaluation_suite(store),
        contracts={name: (made, result) for name, result in checked.items()},
    )


def metrics_of_phase(name: str) -> list[dict[str, float]]:
    """Lines as the worker writes them."""
    lines = []
    for step in range(1, STEPS[name] + 1):
        wave = math.sin(step * 1.7)
        line = {
            "step": step,
            "tokens": step * TOKENS_PER_STEP,
            "lm": 2 + 5 * math.exp(-step / 20) + 0.05 * wave,
            "mtp": 2.4 + 5 * math.exp(-step / 25),
            "expert_load_0": 1.2 + math.exp(-step / 10),
            "expert_load_1": 1.6 + 0.3 * wave,
            "validation_bits_per_byte_web": 3 - 0.02 * step,
            "validation_bits_per_byte_code": 2 - 0.01 * step,
            "skipped_steps": 2,
            "tokens_per_second": 3000.0 + 10 * step,
            "mfu": 0.21,
            "memory_bytes": 1.5 * 2**30,
        }
        lines.append(line | ({"reward_mean": 0.3 + 0.02 * step + 0.05 * wave} if name == "rl_reasoning" else {}))
    return lines


def rollouts_of_phase() -> list[dict[str, object]]:
    return [
        {
            "step": step,
            "prompt_id": f"q{number}",
            "question": f"What is {number} + 7?",
            "answer": str(number + 7),
            "samples": [f"\n{number + 7}<|user|>", "\n<i>12</i><|user|>", ""],
            "rewards": [1.0, 0.0, 0.0],
        }
        for step in (1, 20)
        for number in range(2)
    ]


def reported_phase(store: Store, name: str, model: str, start: ReportedPhase | None, gate: GateRecipe) -> ReportedPhase:
    is_policy, num_steps = name == "rl_reasoning", STEPS[name]
    record = TrainedCheckpoint(
        phase=name,
        objective={"sft": "sft", "rl_reasoning": "grpo"}.get(name, "pretrain"),
        num_steps=num_steps,
        num_tokens=num_steps * TOKENS_PER_STEP,
        course=name,
        course_tokens=num_steps * TOKENS_PER_STEP,
        lm_loss=2.25,
        mtp_loss=2.5,
        balance_loss=1.01,
        num_rollbacks=int(name == "sft"),
        validation_bits_per_byte={"web": 1.5},
        num_parameters=123_456,
        mean_reward=0.61 if is_policy else None,
        is_chat_trained=name in ("sft", "rl_reasoning"),
        chat_template_digest="c" * 64,
        tokenizer_digest="t" * 64,
        special_token_ids={},
        export_digest="f" * 64,
    )

    def write(output: Output) -> None:
        toy_checkpoint_step(model)(output=output)
        files = {
            "metrics.jsonl": metrics_of_phase(name),
            **({"rollouts.jsonl": rollouts_of_phase()} if is_policy else {}),
        }
        for file, lines in files.items():
            output.path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))

    checkpoint = commit(store, toy("train_phase", record, write, evidence=("*.jsonl",)), name)
    packed = PackedPhase(
        num_rows=60,
        num_tokens=15360,
        sequence_length=256,
        packing="stream",
        num_pieces=70,
        fill_share=1.0,
        num_too_long=0,
        tokens_by_domain={"web": 9000, "code": 6360},
        epochs_by_domain={"web": 1.5, "code": 2.0},
        course_tokens_by_domain={"web": 12000, "code": 6360},
        course_epochs_by_domain={"web": 2.25, "code": 2.0},
        num_rearranged=13,
        absent_domains=("commit",),
    )
    given = {"suite": evaluation_suite(store), "recipe": RECIPE, "resources": EvaluationResources(batch_sequences=8)}
    evaluation = commit(store, evaluate_checkpoint, checkpoint=checkpoint, **given)
    before = None if start is None else start.evaluation
    judged = {"evaluation": evaluation, "start_evaluation": before, "champion_evaluation": None, "anchors": None}
    rows = (
        None
        if is_policy
        else commit(store, toy("pack_phase", packed, lambda output: output.path("order.npy").touch()), name)
    )
    quoted = 0.4 if name == "sft" else None
    return ReportedPhase(name, rows, checkpoint, evaluation, commit(store, decide_gate, recipe=gate, **judged), quoted)


def reported_phases(store: Store, names: tuple[str, ...], not_reached: tuple[str, ...] = ()) -> ReportedPhases:
    """The first phase as initialised, the others trained; the gate of the last one refuses."""
    phases: list[ReportedPhase] = []
    for name in names:
        gate = GATE if name != names[-1] else GATE.model_copy(update={"max_bits_per_byte": 0.5})
        phases.append(
            reported_phase(store, name, "trained" if phases else "random", phases[-1] if phases else None, gate)
        )
    return ReportedPhases(tuple(phases), not_reached)


def write_toy_report(store: Store, data: PreparedData, phases: ReportedPhases) -> Artifact[Report]:
    last = phases.last
    gguf = commit(store, convert_to_gguf, checkpoint=last.checkpoint, recipe=RELEASE)
    scored = commit(
        store, evaluate_gguf, gguf=gguf, checkpoint=last.checkpoint, suite=data.suite, recipe=RELEASE, resources=SERVING
    )
    released = commit(store, decide_quantization, gguf_evaluation=scored, recipe=RELEASE)
    return commit(
        store,
        write_report,
        data=data,
        phases=phases,
        gguf_evaluation=scored,
        quantization_decision=released,
        decision=last.decision,
    )


def write_unreleased_report(store: Store, data: PreparedData, phases: ReportedPhases) -> Artifact[Report]:
    """Of a run that ended before the release."""
    return commit(
        store, write_report, data=data, phases=phases, gguf_evaluation=None, quantization_decision=None, decision=None
    )
