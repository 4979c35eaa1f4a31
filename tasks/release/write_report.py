"""One self-contained report.html about a release: data funnel, training curve, evaluation, verdicts, digests of every stage.

In: the artifacts of a run. Out: report.html, as evidence: it shows times and keys, which do not enter digests. Every number is read from
an artifact or its manifest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.step import Artifact, Output, Record, step
from tasks.evaluation.items import ARITHMETIC, Item, bits_per_byte, read_items, validation_items
from tasks.release.report_page import curves, page, paragraph, section, table

if TYPE_CHECKING:
    from tasks.data.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.deduplicate_documents import DeduplicatedDocuments
    from tasks.data.filter_documents import FilteredDocuments
    from tasks.data.ingest_documents import IngestedDocuments
    from tasks.data.shard_documents import TokenShards
    from tasks.data.train_tokenizer import TrainedTokenizer
    from tasks.evaluation.decide_gate import GateDecision
    from tasks.evaluation.evaluate_checkpoint import Evaluation
    from tasks.release.evaluate_gguf import GgufEvaluation
    from tasks.training.train_phase import TrainedCheckpoint

DIGITS = 12
"""Of a digest, where a person reads it."""
ARCHITECTURE_KEYS = (
    "num_hidden_layers", "first_k_dense_replace", "hidden_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "num_nextn_predict_layers", "rope_theta",
)  # fmt: skip


class Report(Record):
    """Where the report says it all in one line."""

    bits_per_byte: float | None
    accepted: bool
    """Whether every gate that the report shows accepted."""


@step(content=(), evidence=("report.html",), distributions=("pyarrow",))
def write_report(
    *,
    ingested: Artifact[IngestedDocuments],
    deduplicated: Artifact[DeduplicatedDocuments],
    filtered: Artifact[FilteredDocuments],
    decontaminated: Artifact[DecontaminatedDocuments],
    shards: Artifact[TokenShards],
    tokenizer: Artifact[TrainedTokenizer],
    checkpoint: Artifact[TrainedCheckpoint],
    evaluation: Artifact[Evaluation],
    phase_decision: Artifact[GateDecision],
    gguf_evaluation: Artifact[GgufEvaluation],
    release_decision: Artifact[GateDecision],
    decision: Artifact[GateDecision],
    output: Output,
) -> Report:
    """The smoke test is an effect and not in here: its result is a tag of the registered version."""
    stages: list[Artifact[Any]] = [
        ingested, deduplicated, filtered, decontaminated, tokenizer, shards, checkpoint, evaluation, phase_decision, gguf_evaluation,
        release_decision, decision,
    ]  # fmt: skip
    decisions = {"Phase gate": phase_decision, "Quantized files": release_decision, "Against the champion": decision}
    accepted = all(judged.record.accepted for judged in decisions.values())
    trained, figure = checkpoint.record, evaluation.record
    facts = [
        ("verdict", "accepted" if accepted else "refused"),
        ("validation bits per byte", "not finite" if figure.bits_per_byte is None else f"{figure.bits_per_byte:.4f}"),
        ("arithmetic answered rightly", f"{figure.arithmetic_accuracy:.1%}"),
        ("parameters", f"{trained.num_parameters:,}"),
        ("tokens trained on", f"{trained.num_tokens:,}"),
        ("documents read", f"{ingested.record.num_documents:,}"),
    ]
    sections = [
        section("Verdicts", *(_verdict(title, judged.record) for title, judged in decisions.items()), _rival(decision.record)),
        section("Evaluation", _evaluation(read_items(evaluation.path("items.parquet")))),
        section("Training", _training(checkpoint)),
        section("Data", _funnel(ingested.record, deduplicated.record, filtered.record, decontaminated.record)),
        section("Files for llama.cpp", _gguf(gguf_evaluation.record)),
        section("Model", _architecture(checkpoint.path("hf/config.json"))),
        section("Where it comes from", _provenance(stages), _versions(stages)),
    ]
    subtitle = f"checkpoint {checkpoint.digest[:DIGITS]} of phase {trained.phase}, export {trained.export_digest[:DIGITS]}"
    output.path("report.html").write_text(page("glm46 release report", subtitle, facts, sections), encoding="utf-8")
    return Report(bits_per_byte=figure.bits_per_byte, accepted=accepted)


def publish_report(report: Artifact[Report], path: Path) -> Path:
    """Place the report where a person looks for it; an effect, equal content is left alone."""
    data = report.path("report.html").read_bytes()
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}-{os.getpid()}")
        temporary.write_bytes(data)
        os.replace(temporary, path)
    return path


def _verdict(title: str, decision: GateDecision) -> str:
    word, style = ("accepted", "good") if decision.accepted else ("refused", "bad")
    return paragraph(f"{title}: {word}", style) + "".join(paragraph(reason, "soft") for reason in decision.reasons)


def _rival(decision: GateDecision) -> str:
    if decision.champion_digest:
        return paragraph(f"The champion's evaluation on the same items: {decision.champion_digest[:DIGITS]}.", "soft")
    return paragraph("No champion reigned: there was nothing to compare with.", "soft")


def _evaluation(items: list[Item]) -> str:
    documents = validation_items(items)
    problems = [item for item in items if item.kind == ARITHMETIC]
    by_domain = {name: [item for item in documents if item.domain == name] for name in sorted({item.domain for item in documents})}
    rows = [(name, len(group), sum(item.num_bytes for item in group), bits_per_byte(group)) for name, group in by_domain.items()]
    rows.append(("all", len(documents), sum(item.num_bytes for item in documents), bits_per_byte(documents)))
    right = int(sum(item.score for item in problems))
    return table(("validation domain", "documents", "bytes", "bits per byte"), rows) + paragraph(
        f"Arithmetic on operands that training never saw together: {right} of {len(problems)} answers equal the verified one.", "soft"
    )


def _training(checkpoint: Artifact[TrainedCheckpoint]) -> str:
    record = checkpoint.record
    if record.lm_loss is None:
        return paragraph("These weights were imported: there is no training log.", "soft")
    told = paragraph(
        f"{record.num_steps:,} optimizer steps over {record.num_tokens:,} tokens, objective {record.objective}. Last step: loss "
        f"{record.lm_loss:.4f} on the next token, {record.mtp_loss:.4f} on the one after it (MTP), balance {record.balance_loss:.4f}.",
        "soft",
    )
    steps = [json.loads(line) for line in checkpoint.path("metrics.jsonl").read_text().splitlines()]
    lines = {"next token": "lm", "token after it (MTP)": "mtp"}
    series = {name: [(step["tokens"], step[key]) for step in steps] for name, key in lines.items() if any(step[key] for step in steps)}
    return told + curves("tokens", "cross-entropy, nats per token", series)


def _funnel(
    ingested: IngestedDocuments, deduplicated: DeduplicatedDocuments, filtered: FilteredDocuments, decontaminated: DecontaminatedDocuments
) -> str:
    num_synthetic = decontaminated.num_documents + sum(decontaminated.dropped.values()) - filtered.num_documents
    rows = [
        ("ingest", "documents left out: max_source_bytes reached", ingested.num_unsampled_documents),
        *_reasons("ingest", "records unreadable", ingested.rejected),
        ("ingest", "documents", ingested.num_documents),
        *_reasons("deduplicate", "dropped", deduplicated.dropped),
        ("deduplicate", "documents", deduplicated.num_documents),
        *_reasons("filter", "dropped", filtered.dropped),
        ("filter", "documents", filtered.num_documents),
        ("synthesize", "documents added", num_synthetic),
        *_reasons("decontaminate", "dropped", decontaminated.dropped),
        ("decontaminate", "documents", decontaminated.num_documents),
    ]
    trained, held_out = decontaminated.train_bytes_by_domain, decontaminated.validation_bytes_by_domain
    domains = [(domain, trained.get(domain, 0), held_out.get(domain, 0)) for domain in sorted({*trained, *held_out})]
    return table(("stage", "what", "number"), rows) + table(("domain", "bytes to train on", "bytes held out"), domains)


def _reasons(stage: str, what: str, counts: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """One row per reason, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(stage, f"{what}: {reason}", count) for reason, count in ordered if count]


def _gguf(record: GgufEvaluation) -> str:
    rows = [(gguf_type, "not finite" if bits is None else bits) for gguf_type, bits in record.bits_per_byte.items()]
    return table(("type", "bits per byte"), rows) + paragraph(
        f"Measured by llama.cpp itself on the leading tokens of {record.num_documents} validation documents ({record.num_tokens:,} tokens, "
        f"{record.num_bytes:,} bytes): every token is scored given those before it.",
        "soft",
    )


def _architecture(config_path: Path) -> str:
    config = json.loads(config_path.read_text(encoding="utf-8"))
    return table(("glm4_moe key", "value"), [(key, f"{config[key]:,}") for key in ARCHITECTURE_KEYS])


def _provenance(stages: Iterable[Artifact[Any]]) -> str:
    rows = [
        (manifest.step, manifest.digest[:DIGITS], manifest.key[:DIGITS], f"{manifest.seconds:.1f}", manifest.adopted_from)
        for manifest in (artifact.manifest for artifact in stages)
    ]
    return table(("step", "content digest", "key in the store", "seconds when computed", "adopted from"), rows)


def _versions(stages: Iterable[Artifact[Any]]) -> str:
    versions = {name: version for artifact in stages for name, version in artifact.manifest.identity["distributions"].items()}
    return paragraph("Versions that entered the keys: " + ", ".join(f"{name} {versions[name]}" for name in sorted(versions)), "soft")
