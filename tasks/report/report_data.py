"""The report about the data: the funnel with examples of what was dropped, domains, conversations, sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from infra.step import Artifact, digest_of
from tasks.data.filtering.blocked_documents import BlockedDocuments
from tasks.data.prompts.collect_prompts import CollectedPrompts
from tasks.data.records.documents import REPOSITORY
from tasks.data.seeds.problem_kinds import EXACT
from tasks.prepared_data import PreparedData, PreparedDocuments
from tasks.report.dropped_examples import (
    DOCUMENT_FILES,
    Example,
    dropped_examples,
    first_by_reason,
    shortened,
    taken_down,
)
from tasks.report.report_charts import bars
from tasks.report.report_inputs import DIGITS
from tasks.report.report_page import Cell, code, folded, heading, paragraph, quote, table
from tasks.report.report_quality import quality_section

NUM_REJECTED_EXAMPLES = 5


def data_section(data: PreparedData, blocked: BlockedDocuments | None, unread: Sequence[str]) -> str:
    """From the sources to the training text; no text that `blocked` names. `unread` says what of it no phase reads."""
    documents = data.documents
    return "".join(
        (
            ""
            if documents is None
            else heading("Documents")
            + bars("Documents after each stage", funnel_bars(data, documents))
            + table(("stage", "what", "number"), funnel_rows(data))
            + _clusters(documents, blocked)
            + _examples(data, documents, blocked)
            + quality_section(data, documents)
            + heading("Bytes by domain")
            + _domains(data, documents),
            heading("Conversations and problems"),
            _chats(data),
            heading("What nothing trains on") + "".join(map(paragraph, unread)) if unread else "",
            heading("Sources"),
            table(SOURCE_COLUMNS, source_rows(data)),
        )
    )


def funnel_rows(data: PreparedData) -> list[tuple[str, str, int]]:
    """(stage, what, number): documents in are documents out and those dropped, at every stage; none where no documents
    were prepared."""
    documents = data.documents
    if documents is None:
        return []
    ingested, decontaminated = data.ingested.record, documents.decontaminated.record
    return [
        ("ingest", "records left out: max_source_bytes reached", ingested.num_unsampled_documents),
        *_reasons("ingest", "records unreadable", ingested.rejected),
        ("ingest", "records", ingested.num_documents),
        *_reasons("extract", "records dropped", documents.extracted.record.dropped),
        ("extract", "documents", documents.extracted.record.num_documents),
        *(
            row
            for name, (step, _, _) in _dropping(data, documents).items()
            if name != "decontaminate"
            for row in _stage(name, step)
        ),
        ("synthesize", "documents added", data.problems.record.num_documents),
        *_reasons("decontaminate", "dropped", decontaminated.dropped),
        ("decontaminate", "documents", decontaminated.num_documents),
        ("concatenate", "repositories", documents.repositories.record.num_repositories),
        ("concatenate", "documents put into them", documents.repositories.record.num_files),
        ("concatenate", "documents of whole repositories", documents.repositories.record.num_documents),
    ]


def funnel_bars(data: PreparedData, documents: PreparedDocuments) -> list[tuple[str, float, str]]:
    """Documents after each stage that drops some: name, number, and the number as text with how many it dropped."""
    counts = [
        ("ingest, records", data.ingested.record.num_documents, {}),
        ("extract", documents.extracted.record.num_documents, {}),
    ]
    counts += [
        (name, step.record.num_documents, step.record.dropped)
        for name, (step, _, _) in _dropping(data, documents).items()
    ]
    lost = [sum(dropped.values()) for _, _, dropped in counts]
    return [
        (name, number, f"{number:,}{f' (-{gone:,})' if gone else ''}")
        for (name, number, _), gone in zip(counts, lost, strict=True)
    ]


def _dropping(
    data: PreparedData, documents: PreparedDocuments
) -> dict[str, tuple[Artifact[Any], tuple[Artifact[Any], ...], str]]:
    """Stages that drop documents: the artifact, what the stage was given, and what `kept_id` means there."""
    return {
        "boilerplate": (documents.boilerplate_free, (documents.extracted,), ""),
        "deduplicate": (documents.deduplicated, (documents.scored,), "in its place stays"),
        "semantic": (documents.distinct, (documents.deduplicated,), "in its place stays"),
        "filter": (documents.filtered, (documents.split,), ""),
        "decontaminate": (
            documents.decontaminated,
            (documents.masked, data.problems),
            "it overlaps with the evaluation item",
        ),
    }


def _stage(name: str, artifact: Artifact[Any]) -> list[tuple[str, str, int]]:
    return [*_reasons(name, "dropped", artifact.record.dropped), (name, "documents", artifact.record.num_documents)]


def _reasons(stage: str, what: str, counts: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """One row per reason, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(stage, f"{what}: {reason}", count) for reason, count in ordered if count]


def _clusters(documents: PreparedDocuments, blocked: BlockedDocuments | None) -> str:
    """Clusters that may be a template: many pages of one source that count as one."""
    clusters = documents.deduplicated.record.largest_clusters
    named = (identity for cluster in clusters for identity in (cluster.kept_id, cluster.removed_id))
    files = [file for made in (documents.extracted, documents.scored) for file in made.files(DOCUMENT_FILES)]
    hidden = taken_down(named, files, blocked)
    shown = [cluster for cluster in clusters if not {cluster.kept_id, cluster.removed_id} & hidden]
    said = "".join(paragraph(cluster.describe()) for cluster in shown)
    return heading("Largest clusters of near-duplicates") + said if shown else ""


def _examples(data: PreparedData, documents: PreparedDocuments, blocked: BlockedDocuments | None) -> str:
    parts = [
        folded(
            f"{stage} · {reason}: {dropped.record.dropped[reason]:,} documents, for example",
            "".join(_example(example, why) for example in examples),
        )
        for stage, (dropped, inputs, why) in _dropping(data, documents).items()
        for reason, examples in dropped_examples(dropped, inputs, blocked, documents.extracted).items()
    ]
    rejected = _rejected(data.ingested)
    if rejected:
        parts.append(
            folded(
                f"ingest · {sum(data.ingested.record.rejected.values()):,} records unreadable, for example", rejected
            )
        )
    return heading("What was dropped, and why") + "".join(parts) if parts else ""


def _example(example: Example, why: str) -> str:
    kept = f"; {why} {example.kept_id}" if example.kept_id else ""
    return paragraph(f"document {example.document_id}{kept}", "soft") + quote(example.text)


def _rejected(artifact: Any) -> str:
    """Positions of records that no document could be made of."""
    examples = first_by_reason(artifact.file("rejected.parquet"), artifact.record.rejected, NUM_REJECTED_EXAMPLES)
    rows = [row for _, own in sorted(examples.items()) for row in sorted(own, key=itemgetter("source", "offset"))]
    cells = [(row["reason"], row["source"], row["offset"], shortened(row["detail"])) for row in rows]
    return table(("reason", "file", "offset", "detail"), cells)


def _domains(data: PreparedData, documents: PreparedDocuments) -> str:
    record, tokens = documents.decontaminated.record, documents.shards.record.tokens_by_domain
    repositories = documents.repositories.record
    trained = record.train_bytes_by_domain | {REPOSITORY: repositories.train_bytes}
    held_out = record.held_out_bytes_by_domain | {REPOSITORY: repositories.held_out_bytes}
    rows = [
        (name, trained.get(name, 0), tokens.get(name, 0), held_out.get(name, 0))
        for name in sorted({*trained, *held_out})
    ]
    sample = data.tokenizer.record
    missing = "".join(
        f" Its share of {name} lacks {count:,} characters." for name, count in sample.missing_chars.items()
    )
    origin = (
        "given as a file"
        if sample.given_sha256
        else f"learned from {sample.num_sample_chars:,} characters of {sample.num_sample_documents:,} documents"
    )
    return table(("domain", "bytes to train on", "tokens in shards", "bytes held out"), rows) + paragraph(
        f"Tokens of a byte-level BPE of {sample.num_ordinary_tokens:,} ordinary tokens, {origin}.{missing} "
        "A repository holds files of the domain code again, one after the other.",
        "soft",
    )


def _chats(data: PreparedData) -> str:
    chats, problems, shards = data.chats.record, data.problems.record, data.chat_shards.record
    clean = None if data.documents is None else data.documents.decontaminated.record
    rows: list[tuple[Cell, ...]] = [
        *(
            []
            if clean is None or data.documents is None
            else [
                ("problems in documents", problems.num_training_problems),
                ("prompts of reinforcement learning", clean.num_prompts),
                *_asked(data.documents.prompts.record),
                ("prompts that overlap with evaluation", clean.num_dropped_prompts),
            ]
        ),
        ("problems that only evaluate", problems.num_evaluation_problems),
        *((f"conversations, {name}", count) for name, count in sorted(chats.chats_by_collection.items())),
        *((f"conversations dropped: {reason}", count) for reason, count in sorted(chats.dropped.items())),
        *((f"records that are no conversation: {reason}", count) for reason, count in sorted(chats.rejected.items())),
        *_verified("seed problems", "solutions that do not verify", data.solutions),
        *_verified("seed problems with a worked solution", "no variation", data.variations),
        *(
            []
            if data.traces is None
            else _verified("problems that a teacher was asked", "answers that are not kept", data.traces)
        ),
        ("conversations to train on", chats.training_chats),
        ("conversations held out", chats.validation_chats),
        ("their tokens", shards.num_tokens),
        ("of these what an assistant writes", shards.num_trained_tokens),
    ]
    return table(("what", "number"), rows)


def _asked(prompts: CollectedPrompts) -> list[tuple[Cell, ...]]:
    """Prompts of files by kind, and records that are none by reason; the generated ones are the rest."""
    kinds = sorted(prompts.prompts_by_kind.items())
    return [
        *((f"prompts of files: {kind}", count) for kind, count in kinds if kind != EXACT),
        *((f"records of files that are no prompt: {reason}", n) for reason, n in sorted(prompts.rejected.items())),
    ]


def _verified(asked: str, refused: str, artifact: Artifact[Any]) -> list[tuple[Cell, ...]]:
    """How many seeds there were, how many answers they gave, and how many were not kept, by reason; empty where there
    was no seed."""
    record = artifact.record
    if not record.num_seeds:
        return []
    rows = [(f"{refused}: {reason}", count) for reason, count in sorted(record.rejected.items())]
    return [(asked, record.num_seeds), (f"conversations of {asked}", record.num_chats), *rows]


SOURCE_COLUMNS = ("collection", "role", "domain", "licence", "files", "bytes", "sha256 over the files")


def source_rows(data: PreparedData) -> list[tuple[Cell, ...]]:
    """One row per collection, role and domain of the listed files."""
    import pyarrow.parquet as pq

    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in pq.read_table(data.ingested.path("sources.parquet")).to_pylist():
        groups.setdefault((row["collection"], row["role"], row["domain"], row["licence"] or "not stated"), []).append(
            row
        )
    return [
        (*names, len(rows), sum(row["size"] for row in rows), code(digest_of([row["sha256"] for row in rows])[:DIGITS]))
        for names, rows in sorted(groups.items())
    ]
