"""Writes model_card.md and data_card.md: the report's figures as Markdown, every number read from an artifact."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
from tasks.evaluation.decide_gate import GateDecision
from tasks.prepared_data import PreparedData
from tasks.report.report_data import SOURCE_COLUMNS, funnel_rows, source_rows
from tasks.report.report_evaluation import figure_rows
from tasks.report.report_inputs import DIGITS, ReportedPhases
from tasks.report.report_page import Cell, Figure, Html

ARCHITECTURE_KEYS = (
    "num_hidden_layers",
    "first_k_dense_replace",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_nextn_predict_layers",
    "rope_theta",
)


def model_card(data: PreparedData, phases: ReportedPhases, verdicts: Iterable[tuple[str, GateDecision]]) -> str:
    """What the released weights are, how they were trained, how good they are. `phases` led to them."""
    record = phases.last.checkpoint.record
    asked = (
        "answers in the GLM chat template"
        if record.is_chat_trained
        else "continues text; it was trained on no conversation"
    )
    return _lines(
        f"# glm46 model, export {record.export_digest[:DIGITS]}",
        f"{record.num_parameters:,} parameters, architecture glm4_moe, last phase {record.phase}. It {asked}.",
        "## Training",
        _table(
            ("phase", "objective", "steps", "tokens", "checkpoint"),
            [
                (phase.name, phase.objective, trained.num_steps, trained.num_tokens, phase.checkpoint.digest[:DIGITS])
                for phase, trained in ((phase, phase.checkpoint.record) for phase in phases)
            ],
        ),
        f"{phases.num_tokens:,} tokens in all, drawn from {_documents(data)}{data.chats.record.training_chats:,} "
        f"conversations: training-content-summary.md of its evidence counts those that were read, and data_card.md "
        f"beside the report says what all of them are.",
        "## Evaluation",
        _table(("figure", *(phase.name for phase in phases)), figure_rows(phases)),
        f"In brackets the 95 % interval; suite {phases.last.evaluation.record.suite_digest[:DIGITS]}.",
        "## Gates",
        *(_gate(title, verdict) for title, verdict in verdicts),
        "## Limits",
        f"The figures above are all that was measured. {_untested(phases)}: do not use the model where those matter "
        f"without testing them.",
        "## Architecture",
        _table(("key", "value"), architecture_rows(phases)),
        "## Identity",
        _table(
            ("what", "digest"),
            [
                ("checkpoint", phases.last.checkpoint.digest),
                ("export", record.export_digest),
                ("tokenizer", record.tokenizer_digest),
                ("chat template", record.chat_template_digest),
                ("sources", data.ingested.manifest.identity["inputs"]["sources"]),
            ],
        ),
    )


def _gate(title: str, decision: GateDecision) -> str:
    word = "accepted" if decision.accepted else "refused"
    bounds = [f"    - {bound.outcome}: {bound.sentence}" for bound in decision.bounds]
    return "\n".join([f"- **{title}: {word}.**", *bounds])


def _untested(phases: ReportedPhases) -> str:
    if phases.last.evaluation.record.safe_answer_share is None:
        return "No test of safety, bias or factual accuracy was made"
    counted = "Of safety only refusals of harmful requests and answers to harmless ones were counted"
    return f"{counted}, and no test of bias or factual accuracy was made"


def architecture_rows(phases: ReportedPhases) -> list[tuple[str, str]]:
    """Keys of config.json with their values."""
    config = json.loads(phases.last.checkpoint.path("hf/config.json").read_text(encoding="utf-8"))
    return [(key, f"{config[key]:,}") for key in ARCHITECTURE_KEYS]


def data_card(data: PreparedData) -> str:
    """What the model was trained and evaluated on, and what was left out, by reason."""
    problems, suite, walk = data.problems.record, data.suite.record, data.documents
    return _lines(
        f"# Data of shards {(data.shards or data.chat_shards).digest[:DIGITS]}",
        f"{_documents(data)}{data.chats.record.training_chats:,} conversations, from {data.num_sources:,} files.",
        "## Sources",
        _table(SOURCE_COLUMNS, source_rows(data)),
        *([] if walk is None else _walk_of(data, walk.decontaminated.record)),
        "## Made, not found",
        f"{problems.num_training_problems:,} verified problems in documents, {problems.num_chats:,} as conversations, "
        f"{problems.num_prompts:,} as prompts of reinforcement learning, {problems.num_evaluation_problems:,} that "
        f"only evaluate.",
        "## Evaluation",
        f"{suite.num_documents:,} held-out {'conversations' if walk is None else 'documents'} "
        f"({suite.num_document_bytes:,} bytes), {suite.num_problems:,} problems, "
        f"{suite.num_chat_problems:,} of them as conversations, {suite.num_choice_items:,} multiple-choice questions. "
        + (
            "A conversation that shares an n-gram with a question is dropped."
            if walk is None
            else f"{walk.decontaminated.record.num_protected_items:,} items are protected: a document that shares an "
            "n-gram with one is dropped."
        ),
        "## Contracts",
        _table(
            ("contract", "rows", "expectations"),
            [
                (result.contract, result.num_rows, result.num_expectations)
                for result in (artifact.record for artifact in data.contract_results)
            ],
        ),
    )


def _documents(data: PreparedData) -> str:
    shards = data.shards
    if shards is None:
        return ""
    return f"{shards.record.num_documents:,} documents ({shards.record.num_tokens:,} tokens in shards) and "


def _walk_of(data: PreparedData, decontaminated: DecontaminatedDocuments) -> list[str]:
    """What became of the documents."""
    trained, held_out = decontaminated.train_bytes_by_domain, decontaminated.held_out_bytes_by_domain
    rows = [(name, trained.get(name, 0), held_out.get(name, 0)) for name in sorted({*trained, *held_out})]
    return [
        "## From sources to training text",
        _table(("stage", "what", "number"), funnel_rows(data)),
        "## Domains",
        _table(("domain", "bytes to train on", "bytes held out"), rows),
    ]


def _lines(*blocks: str) -> str:
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_shown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(cell: Cell) -> str:
    """A vertical bar would end the cell; digests lose their tags."""
    if isinstance(cell, Html | Figure):
        return cell.text.removeprefix("<code>").removesuffix("</code>")
    return f"{cell:,}" if isinstance(cell, int) else str(cell).replace("|", "\\|").replace("\n", " ")
