"""The report about the model's origin: phases, shards, filters, sources; contracts; time; versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from operator import itemgetter
from typing import Any

from infra.step import Artifact
from tasks.prepared_data import PreparedData, PreparedDocuments
from tasks.report.report_charts import timeline
from tasks.report.report_inputs import DIGITS, ReportedPhases
from tasks.report.report_page import Cell, code, folded, heading, paragraph, table

MAX_IDLE_SECONDS = 60.0
"""Longer gaps, as between two runs, are cut out of the picture of times."""


def lineage_section(data: PreparedData, phases: ReportedPhases) -> str:
    """From the released weights back to the sources, every hand-over with its digest."""
    shards, walk = data.shards, data.documents
    chain = [
        *(
            []
            if shards is None
            else [
                _step(
                    "token shards",
                    shards,
                    f"{shards.record.num_tokens:,} tokens of {shards.record.num_documents:,} documents",
                )
            ]
        ),
        _step("conversation shards", data.chat_shards, f"{data.chat_shards.record.num_tokens:,} tokens"),
        _step("tokenizer", data.tokenizer, f"{data.tokenizer.record.num_tokens:,} tokens"),
        _step("conversations", data.chats, f"{data.chats.record.num_chats:,}"),
        *(
            _step(name, artifact, f"{artifact.record.num_documents:,} documents")
            for name, artifact in (
                *([] if walk is None else [("decontaminated", walk.decontaminated)]),
                ("problems", data.problems),
                *([] if walk is None else _walk(walk)),
                ("ingested", data.ingested),
            )
        ),
        _entry("sources", data.ingested.manifest.identity["inputs"]["sources"], f"{data.num_sources:,} files"),
    ]
    note = "The newest first; each was made from the entries below it. `glm46 lineage` goes down to single documents."
    return paragraph(note, "soft") + _tree([*_phase_entries(phases), *chain])


def _walk(documents: PreparedDocuments) -> list[tuple[str, Artifact[Any]]]:
    return [
        ("masked", documents.masked),
        ("filtered", documents.filtered),
        ("split", documents.split),
        ("distinct", documents.distinct),
        ("deduplicated", documents.deduplicated),
        ("scored", documents.scored),
        ("boilerplate free", documents.boilerplate_free),
        ("extracted", documents.extracted),
    ]


def _phase_entries(phases: ReportedPhases) -> list[str]:
    """The newest phase first: what it was trained on, and what it started from. Then other branches."""
    entries = []
    path = phases.path.phases
    for phase in reversed(path):
        record = phase.checkpoint.record
        detail = f"{record.num_tokens:,} tokens, export {record.export_digest[:DIGITS]}"
        entry, read = _step(f"checkpoint of {phase.name}", phase.checkpoint, detail), []
        if phase.packed is not None:
            shares = ", ".join(
                f"{name} {tokens:,}" for name, tokens in sorted(phase.packed.record.tokens_by_domain.items())
            )
            read += [_step("packed rows", phase.packed, f"{phase.packed.record.num_rows:,} rows, tokens of {shares}")]
        if phase.solutions is not None:
            counted = phase.solutions.record
            answering = " and ".join(dict.fromkeys(own.phase for own in counted.domains))
            name, number = ("right answers", counted.num_kept) if read else ("pass rates", counted.num_prompts)
            read.append(_step(name, phase.solutions, f"{number:,} of the weights of {answering}"))
        entries.append(entry + (_tree(read) if read else ""))
    start = path[0].start
    names = {phase.checkpoint.digest: phase.name for phase in phases}
    branches = [
        _step(f"branch {phase.name}", phase.checkpoint, f"from {names.get(phase.start or '', 'given weights')}")
        for phase in phases
        if phase not in path
    ]
    return [*entries, *([] if start is None else [_entry("weights that the run started with", start, "")]), *branches]


def _step(name: str, artifact: Artifact[Any], detail: str) -> str:
    return _entry(name, artifact.digest, detail)


def _entry(name: str, digest: str, detail: str) -> str:
    return f'{escape(name)} <code>{digest[:DIGITS]}</code> <span class="soft">{escape(detail)}</span>'


def _tree(entries: Iterable[str]) -> str:
    return f'<ul class="tree">{"".join(f"<li>{entry}</li>" for entry in entries)}</ul>'


def contract_section(data: PreparedData) -> str:
    """A broken contract stops a run: all that are shown were met."""
    rows: list[tuple[Cell, ...]] = [
        (
            artifact.record.contract,
            artifact.record.num_rows,
            artifact.record.num_expectations,
            "met",
            code(artifact.digest[:DIGITS]),
        )
        for artifact in data.contract_results
    ]
    findings = [
        (
            artifact.record.contract,
            finding["table"],
            finding["expectation"],
            finding["arguments"].get("column", ""),
            str(finding["observed"]),
        )
        for artifact in data.contract_results
        for finding in json.loads(artifact.path("findings.json").read_text())
    ]
    if not rows:
        return ""
    return table(("contract", "rows", "expectations", "result", "digest"), rows) + folded(
        f"All {len(findings)} expectations and what was measured",
        table(("contract", "table", "expectation", "column", "measured"), findings),
    )


def time_section(stages: Sequence[tuple[str, Artifact[Any]]]) -> str:
    """When each stage was computed and how long it took; one found in the store took no time in this run."""
    timed = [(name, each.committed_at - each.manifest.seconds, each.committed_at) for name, each in stages]
    rows, busy_until, idle = [], 0.0, 0.0
    for name, began, ended in sorted(timed, key=itemgetter(1)):
        if rows and began - busy_until > MAX_IDLE_SECONDS:
            idle += began - busy_until
        busy_until = max(busy_until, ended)
        rows.append((name, began - idle, ended - idle, f"{ended - began:,.1f} s"))
    total = sum(artifact.manifest.seconds for _, artifact in stages)
    note = f"{total:,.0f} s in all, as measured when each stage was computed; a later run finds them in the store."
    note += f" {idle:,.0f} s in which none was computed are left out." if idle else ""
    return timeline("when each stage ran", rows) + paragraph(note, "soft")


def transfer_section(data: PreparedData) -> str:
    """What of the data stages went through their own process; the rest went between executors and the store."""
    rows = []
    for artifact in data.stages:
        manifest = artifact.manifest
        size = sum(entry.size for entry in (*manifest.content.values(), *manifest.evidence.values()))
        rows.append((manifest.step, size, manifest.read_bytes, manifest.written_bytes))
    sizes, read, written = (sum(column) for column in list(zip(*rows, strict=True))[1:])
    note = (
        f"{sizes:,} bytes were written, {written:,} of them by the process of the step. It read {read:,} bytes. "
        "Executors read and wrote the others."
    )
    columns = ("stage", "bytes in the store", "read by its process", "written by its process")
    return heading("Bytes through the driver") + paragraph(note) + folded("By stage", table(columns, rows))


def named_stages(
    data: PreparedData, phases: ReportedPhases, others: Iterable[tuple[str, Artifact[Any] | None]]
) -> list[tuple[str, Artifact[Any]]]:
    """Every artifact of the run, by step and phase; of the others, which may be None, by step and format."""
    trained = (*phases, *phases.reward_models)
    of_phases = ((phase.name, artifact) for phase in trained for artifact in phase.stages)
    stages = [*(("", artifact) for artifact in data.stages), *of_phases, *others]
    return [(f"{each.manifest.step} {name}".rstrip(), each) for name, each in stages if each is not None]


def key_section(stages: Sequence[tuple[str, Artifact[Any]]]) -> str:
    """Where the store holds everything, and the versions that entered the keys."""
    rows: list[tuple[Cell, ...]] = [
        (name, code(manifest.digest[:DIGITS]), code(manifest.key[:DIGITS]), manifest.adopted_from)
        for name, manifest in ((name, artifact.manifest) for name, artifact in stages)
    ]
    versions = {
        name: version for _, artifact in stages for name, version in artifact.manifest.identity["distributions"].items()
    }
    written = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    return (
        heading("Keys")
        + table(("step", "content digest", "key in the store", "adopted from"), rows)
        + paragraph(f"Versions that entered the keys: {written}", "soft")
    )
