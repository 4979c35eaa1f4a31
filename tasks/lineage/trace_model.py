"""Traces a registered model to phases, packed orders, shards, tokenizer, data steps with their drops, and sources.

Sources go down to record offsets. It reads only the store's manifests and the registry's database: no server, no
Spark.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from configs.files.atomic_files import replacing
from infra.registry.registered_versions import NamedVersion
from infra.step import Manifest
from infra.storage.manifest_graph import ManifestGraph
from tasks.lineage.trained_phases import IMPORT_STEP, TRAIN_STEP, ShardReads, TrainedPhase, shard_reads, trained_phases

if TYPE_CHECKING:
    import pyarrow as pa

NUM_FIRST_OFFSETS = 3
NUM_SHOWN_SOURCES = 50
SOURCES_FILE = "sources.parquet"
TRAINING_STEPS = (TRAIN_STEP, IMPORT_STEP, "pack_phase")
"""They are among the ancestors of conversations that weights sampled, and are named as phases."""
MEMBER = "!"
"""Between the name of an archive and that of its member, in a document's source
(tasks/data/readers/source_records.py)."""


class ShardUse(BaseModel):
    """One shard of one phase."""

    name: str
    sha256: str
    """Of its .bin; of prompts.parquet in a policy phase."""
    num_documents: int
    """Different documents of it that the phase read."""
    num_tokens: int
    """With repetitions; 0 for prompts."""


class PhaseUse(BaseModel):
    """One phase of the chain."""

    name: str
    objective: str
    key: str
    digest: str
    num_tokens: int
    num_steps: int
    packed_key: str
    """Empty in a policy phase, as is the digest."""
    packed_digest: str
    course_epochs: dict[str, float]
    """Passes over every domain that the phases of its course had read at its end; empty in a policy phase."""
    shards: tuple[ShardUse, ...]


class StepUse(BaseModel):
    """One data step of the chain, and what it left out by reason."""

    step: str
    key: str
    digest: str
    dropped: dict[str, int]
    recipe: dict[str, Any]
    """The recipe of the step, as it entered its key; empty where it has none."""


class SourceUse(BaseModel):
    """One source with the documents of it that were trained on."""

    name: str
    sha256: str
    """Of the file; empty where a step made the documents itself."""
    licence: str
    num_documents: int
    num_tokens: int
    first_offsets: tuple[int, ...]
    """Byte offsets of its first trained records (numbers of the problem, for synthetic ones)."""


class ModelLineage(BaseModel):
    """All that one version is made of."""

    model: str
    version: str
    aliases: tuple[str, ...]
    key: str
    digest: str
    imported: str
    """Digest of the Hugging Face directory that the first phase started from; empty for random weights."""
    tokenizer_key: str
    tokenizer_digest: str
    phases: tuple[PhaseUse, ...]
    steps: tuple[StepUse, ...]
    sources: tuple[SourceUse, ...]
    num_documents: int

    def describe(self) -> str:
        """Lines for a terminal."""
        names = ", ".join(self.aliases) or "no alias"
        lines = [f"{self.model} version {self.version} ({names})  digest {self.digest[:12]}  key {self.key[:12]}"]
        lines.append(f"started from {f'imported weights {self.imported[:12]}' if self.imported else 'random weights'}")
        lines.append(f"tokenizer {self.tokenizer_digest[:12]}")
        for phase in self.phases:
            packed = f"packed order {phase.packed_digest[:12]}" if phase.packed_digest else "prompts"
            lines.append(
                f"phase {phase.name} ({phase.objective}): {phase.num_tokens:,} tokens, {phase.num_steps:,} steps, "
                f"{packed}"
            )
            if phase.course_epochs:
                passes = ", ".join(f"{domain} {epochs:.2f}" for domain, epochs in phase.course_epochs.items())
                lines.append(f"    passes on its course up to here: {passes}")
            for shard in phase.shards:
                lines.append(
                    f"    {shard.name:<20} {shard.num_documents:>9,} documents {shard.num_tokens:>13,} tokens  "
                    f"{shard.sha256[:12]}"
                )
        lines.append("data steps")
        for step in self.steps:
            dropped = ", ".join(f"{reason} {count:,}" for reason, count in step.dropped.items())
            lines.append(
                f"    {step.step:<24} {step.digest[:12]}  {f'left out: {dropped}' if dropped else ''}".rstrip()
            )
        lines.append(f"{len(self.sources):,} sources with {self.num_documents:,} trained documents")
        for source in sorted(self.sources, key=lambda source: (-source.num_tokens, source.name))[:NUM_SHOWN_SOURCES]:
            counts = f"{source.num_documents:>7,} documents {source.num_tokens:>11,} tokens"
            offsets = ", ".join(map(str, source.first_offsets))
            lines.append(
                f"    {source.name:<44} {source.sha256[:12] or '-':<12} {counts}  first at {offsets}  "
                f"{source.licence}".rstrip()
            )
        if len(self.sources) > NUM_SHOWN_SOURCES:
            lines.append(
                f"    and {len(self.sources) - NUM_SHOWN_SOURCES:,} more with fewer tokens: --json lists them all"
            )
        return "\n".join(lines)


def trace_model(graph: ManifestGraph, version: NamedVersion, records_path: Path | None) -> ModelLineage:
    """The lineage of a version; with `records_path` every trained document is written there as well (Parquet: id,
    source, offset, piece, shard, sequence, phases, tokens). Raises ValueError where the store lacks a part."""
    checkpoint = _checkpoint(graph, version)
    phases, root = trained_phases(graph, checkpoint)
    shards, trained = _read_shards(graph, phases, records_path)
    data = graph.ancestors(
        *(manifest for phase in phases for manifest in (*phase.shards, phase.prompts) if manifest is not None)
    )
    tokenizer = graph.input_of(checkpoint, "tokenizer")
    assert tokenizer is not None, checkpoint.key
    sources = _sources(graph, data, trained)
    return ModelLineage(
        model=version.model,
        version=version.registered.version,
        aliases=version.aliases,
        key=checkpoint.key,
        digest=checkpoint.digest,
        imported=root.identity["inputs"]["source"] if root.step == IMPORT_STEP else "",
        tokenizer_key=tokenizer.key,
        tokenizer_digest=tokenizer.digest,
        phases=tuple(_phase_use(phase, index, shards) for index, phase in enumerate(phases)),
        steps=tuple(
            StepUse(
                step=made.step,
                key=made.key,
                digest=made.digest,
                dropped=dropped_by_reason(made),
                recipe=made.identity["recipe"] or {},
            )
            for made in data
            if made.step not in TRAINING_STEPS
        ),
        sources=sources,
        num_documents=sum(source.num_documents for source in sources),
    )


def dropped_by_reason(manifest: Manifest) -> dict[str, int]:
    """What a data step left out: documents it dropped and records it could not read."""
    return {**manifest.record.get("dropped", {}), **manifest.record.get("rejected", {})}


def _checkpoint(graph: ManifestGraph, version: NamedVersion) -> Manifest:
    checkpoint = graph.by_digest.get(version.registered.digest)
    if checkpoint is None:
        raise ValueError(
            f"store {graph.store.uri} does not hold {version.model} version {version.registered.version}, which was "
            f"registered from "
            f"{version.registered.tags.get('glm46.store', 'another store')}: name it with --store"
        )
    return checkpoint


@dataclass
class _Tally:
    """Trained documents of one source so far."""

    num_documents: int = 0
    num_tokens: int = 0
    first_offsets: tuple[int, ...] = ()


def _read_shards(
    graph: ManifestGraph, phases: list[TrainedPhase], records_path: Path | None
) -> tuple[list[ShardReads], dict[str, _Tally]]:
    """The reads without their tables, and their sums per source. On the way the rows are written to the file, which
    appears when it is whole. Raises ValueError where it would have none."""
    import pyarrow.parquet as pq

    reads: list[ShardReads] = []
    tallies: dict[str, _Tally] = {}
    with ExitStack() as opened:
        writer = None
        for read in shard_reads(graph, phases):
            _tally(read.table, tallies)
            if records_path is not None and writer is None:
                path = opened.enter_context(replacing(records_path))
                writer = opened.enter_context(pq.ParquetWriter(path, read.table.schema, compression="zstd"))
            if writer is not None:
                writer.write_table(read.table)
            reads.append(replace(read, table=read.table.slice(0, 0)))
    if records_path is not None and not reads:
        raise ValueError(f"{records_path} is not written: no phase read a document of shards; leave --records out")
    return reads, tallies


def _tally(table: pa.Table, tallies: dict[str, _Tally]) -> None:
    sums = table.group_by("source").aggregate([("tokens", "sum"), ("tokens", "count"), ("offset", "distinct")])
    for row in sums.to_pylist():
        tally = tallies.setdefault(row["source"], _Tally())
        tally.num_documents += row["tokens_count"]
        tally.num_tokens += row["tokens_sum"]
        tally.first_offsets = tuple(sorted({*tally.first_offsets, *row["offset_distinct"]})[:NUM_FIRST_OFFSETS])


def _phase_use(phase: TrainedPhase, index: int, reads: list[ShardReads]) -> PhaseUse:
    record, packed = phase.checkpoint.record, phase.packed
    used = (
        ShardUse(
            name=read.shard,
            sha256=read.sha256,
            num_documents=read.documents_by_phase[index],
            num_tokens=read.tokens_by_phase[index],
        )
        for read in reads
        if read.documents_by_phase.get(index)
    )
    return PhaseUse(
        name=phase.name,
        objective=record["objective"],
        key=phase.checkpoint.key,
        digest=phase.checkpoint.digest,
        num_tokens=record["num_tokens"],
        num_steps=record["num_steps"],
        packed_key=packed.key if packed else "",
        packed_digest=packed.digest if packed else "",
        course_epochs=packed.record["course_epochs_by_domain"] if packed else {},
        shards=tuple(used),
    )


def _sources(graph: ManifestGraph, data: list[Manifest], tallies: dict[str, _Tally]) -> tuple[SourceUse, ...]:
    """Sources by name, with licence and checksum as the ingestion recorded them."""
    import pyarrow.parquet as pq

    files: dict[str, dict[str, str]] = {}
    for manifest in data:
        if SOURCES_FILE in manifest.content:
            table = pq.read_table(graph.open(manifest).path(SOURCES_FILE), columns=["name", "sha256", "licence"])
            files.update({row["name"]: row for row in table.to_pylist()})
    uses = []
    for name, tally in sorted(tallies.items()):
        file = files.get(name) or files.get(name.partition(MEMBER)[0]) or {"sha256": "", "licence": ""}
        uses.append(
            SourceUse(
                name=name,
                sha256=file["sha256"],
                licence=file["licence"],
                num_documents=tally.num_documents,
                num_tokens=tally.num_tokens,
                first_offsets=tally.first_offsets,
            )
        )
    return tuple(uses)
