"""Traces one document: its position in its source, who dropped it and why, the phases and models trained on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from infra.registry.model_registry import DIGEST_TAG
from infra.registry.registered_versions import NamedVersion
from infra.step import Manifest
from infra.storage.manifest_graph import ManifestGraph
from tasks.data.problems.environment_tasks import HELD_OUT_TASK_SOURCE, TASK_SOURCE
from tasks.data.problems.synthesize_problems import (
    CHAT_SOURCE,
    EVALUATION_SOURCE,
    HELD_OUT_SOURCE,
    PROMPT_SOURCE,
    SAFETY_SOURCE,
)
from tasks.data.records.documents import document_id
from tasks.lineage.stored_rows import find_rows
from tasks.lineage.trained_phases import (
    PROMPTS_FILE,
    TRAIN_STEP,
    TrainedPhase,
    asked_prompt_ids,
    experts_of,
    phase_of,
    tokens_of_sequence,
)

SHARD_STEPS = ("shard_documents", "shard_chats")
FILES_FILE = "files.parquet"
"""File of concatenate_repositories: which document went into which repository."""
FIRST_SEEN = {
    "ingest_documents": {"documents/*": "record", "evaluation/*": "protected evaluation item"},
    "extract_documents": {"documents/*": "document"},
    "synthesize_problems": {
        "documents/*": "document",
        "chats.parquet": "conversation",
        PROMPTS_FILE: "prompt",
        "tasks.parquet": "task of an environment",
        "problems.parquet": "evaluated problem",
        "held_out.parquet": "held-out problem",
        "held_out_tasks.parquet": "held-out task",
        "safety.parquet": "held-out request",
    },
    "collect_chats": {"chats/*": "conversation"},
    "sample_solutions": {"chats/*": "sampled conversation"},
    "concatenate_repositories": {"documents/*": "repository"},
}
"""Steps in which an id appears first: the files of each, and what their rows are."""

COLUMNS = ("id", "source", "offset", "piece", "reason", "kept_id", "shard", "sequence", "split", "repository_id")
"""What is read of a row."""


class Position(BaseModel):
    """The position in a source that a document comes from."""

    kind: str
    step: str
    digest: str
    source: str
    offset: int
    """Byte offset of the record in its decompressed source; the number of the problem for synthetic ones."""
    piece: int
    """Character offset in the record."""


class Drop(BaseModel):
    """A step that dropped the document."""

    step: str
    digest: str
    reason: str
    kept_id: str
    """The document that was kept instead of it, or the evaluation item that it overlaps with."""


class TrainedOn(BaseModel):
    """A phase that read the document."""

    phase: str
    key: str
    digest: str
    shard: str
    sequence: int
    num_tokens: int
    """With repetitions; 0 for a prompt, where the phase trains on its own answers. Inside a repository: of all its
    files together."""
    within: str = ""
    """The repository document that it was read as a part of; empty where it was read by itself."""


class Descendant(BaseModel):
    """A checkpoint of a phase that read the document, or of a later phase that started from it or learned its
    answers."""

    phase: str
    key: str
    digest: str
    model: str
    """Empty where no version of the registry has the digest."""
    version: str
    aliases: tuple[str, ...]


class DocumentLineage(BaseModel):
    """All that happened to one document."""

    id: str
    places: tuple[Position, ...]
    parts: tuple[str, ...]
    """Of a repository the ids of the documents that it is made of, in their order; else empty."""
    split: str
    """train or validation; empty where it was dropped before the split or no split applies."""
    dropped: tuple[Drop, ...]
    trained: tuple[TrainedOn, ...]
    models: tuple[Descendant, ...]

    def describe(self) -> str:
        """Lines for a terminal."""
        lines = [f"document {self.id}"]
        lines += [
            f"  {position.kind} of {position.source} at {position.offset}, piece {position.piece} ({position.step})"
            for position in self.places
        ]
        lines += [f"  made of {len(self.parts)} documents: {', '.join(self.parts)}"] if self.parts else []
        lines += [f"  split {self.split}"] if self.split else []
        for drop in self.dropped:
            lines.append(
                f"  dropped by {drop.step} ({drop.digest[:12]}): "
                f"{drop.reason}{f', kept {drop.kept_id}' if drop.kept_id else ''}"
            )
        for phase in self.trained:
            where = (
                f"{phase.shard} sequence "
                f"{phase.sequence}{f', as a part of repository {phase.within}' if phase.within else ''}"
            )
            lines.append(f"  trained in {phase.phase} ({phase.digest[:12]}): {phase.num_tokens:,} tokens, {where}")
        for model in self.models:
            known = (
                f"{model.model} version {model.version}{''.join(f' = {alias}' for alias in model.aliases)}"
                if model.model
                else "no version"
            )
            lines.append(f"  in checkpoint {model.phase} ({model.digest[:12]}): {known}")
        return "\n".join([*lines, *([] if self.trained else ["  no phase was trained on it"])])


def trace_document(graph: ManifestGraph, versions: list[NamedVersion], identity: str) -> DocumentLineage:
    """The lineage of a document id. Raises ValueError for an id that the store does not know."""
    positions = tuple(
        {
            (position.source, position.offset, position.piece): position for position in _positions(graph, identity)
        }.values()
    )
    dropped = tuple(_drops(graph, identity))
    if not positions and not dropped:
        raise ValueError(
            f"store {graph.store.uri} knows no document {identity}: ids have 16 hex digits; "
            "`glm46 lineage model ALIAS --records FILE.parquet` lists the trained ones"
        )
    trained = tuple(_trained_on(graph, identity))
    splitters = graph.made_by("split_documents", "collect_chats", "concatenate_repositories", "sample_solutions")
    splits = {row["split"] for made in splitters for row in _find(graph, made, ("documents/*", "chats/*"), identity)}
    return DocumentLineage(
        id=identity,
        places=positions,
        parts=tuple(_parts(graph, identity)),
        split=" and ".join(sorted(splits)),
        dropped=dropped,
        trained=trained,
        models=tuple(_descendants(graph, versions, {phase.digest for phase in trained})),
    )


def _positions(graph: ManifestGraph, identity: str) -> Iterator[Position]:
    for manifest in graph.made_by(*FIRST_SEEN):
        for pattern, kind in FIRST_SEEN[manifest.step].items():
            for row in _find(graph, manifest, (pattern,), identity):
                source, offset = (
                    (row["source"], row["offset"]) if "source" in row else _problem_position(manifest, identity)
                )
                yield Position(
                    kind=kind,
                    step=manifest.step,
                    digest=manifest.digest,
                    source=source,
                    offset=offset,
                    piece=row.get("piece", 0),
                )


def _problem_position(manifest: Manifest, identity: str) -> tuple[str, int]:
    """Source and number of a synthetic problem, whose rows hold only the id."""
    counts = {
        PROMPT_SOURCE: "num_prompts",
        TASK_SOURCE: "num_tasks",
        EVALUATION_SOURCE: "num_evaluation_problems",
        CHAT_SOURCE: "num_chats",
        HELD_OUT_SOURCE: "num_held_out_problems",
        HELD_OUT_TASK_SOURCE: "num_held_out_tasks",
        SAFETY_SOURCE: "num_safety_requests",
    }
    for source, name in counts.items():
        for number in range(manifest.record.get(name, 0)):
            if document_id(source, number, 0) == identity:
                return source, number
    raise ValueError(f"step {manifest.step} ({manifest.key[:12]}) holds problem {identity}, but no number has this id")


def _drops(graph: ManifestGraph, identity: str) -> Iterator[Drop]:
    for manifest in graph.by_digest.values():
        for row in _find(graph, manifest, ("dropped.parquet", "rejected.parquet", "dropped_prompts.parquet"), identity):
            kept = row.get("kept_id") or ""
            yield Drop(step=manifest.step, digest=manifest.digest, reason=row["reason"], kept_id=kept)


def _trained_on(graph: ManifestGraph, identity: str) -> Iterator[TrainedOn]:
    members = {made.digest: list(_members(graph, made, identity)) for made in graph.made_by(*SHARD_STEPS)}
    for checkpoint in _checkpoints(graph):
        phase = phase_of(graph, checkpoint)
        rows = [row for shards in phase.shards for row in members[shards.digest]]
        for row in rows:
            num_tokens = tokens_of_sequence(graph, phase, row["shard"], row["sequence"])
            if num_tokens:
                within = "" if row["id"] == identity else row["id"]
                yield _trained(phase, row["shard"], row["sequence"], num_tokens, within)
        asked = [] if phase.prompts is None else _find(graph, phase.prompts, (PROMPTS_FILE,), identity)
        for row in asked:
            assert phase.prompts is not None
            if identity in asked_prompt_ids(graph, checkpoint, phase.prompts):
                yield _trained(phase, PROMPTS_FILE, row["offset"], 0)


def _checkpoints(graph: ManifestGraph) -> list[Manifest]:
    """Those of all phases, each after the one that it was started from."""
    made = graph.ancestors(*graph.made_by(TRAIN_STEP))
    return [graph.by_digest[each.digest] for each in made if each.step == TRAIN_STEP]


def _members(graph: ManifestGraph, shards: Manifest, identity: str) -> Iterator[dict[str, Any]]:
    """Where shards hold a document: by itself, and inside the repositories that it went into."""
    yield from _find(graph, shards, ("members.parquet",), identity)
    repositories = graph.input_of(shards, "repositories")
    for row in _find(graph, repositories, (FILES_FILE,), identity) if repositories is not None else ():
        yield from _find(graph, shards, ("members.parquet",), row["repository_id"])


def _parts(graph: ManifestGraph, identity: str) -> list[str]:
    for manifest in graph.made_by("concatenate_repositories"):
        rows = find_rows(graph, manifest, (FILES_FILE,), {"repository_id": [identity]}, ("id", "number"))
        if rows:
            return [row["id"] for row in sorted(rows, key=lambda row: row["number"])]
    return []


def _trained(phase: TrainedPhase, shard: str, sequence: int, num_tokens: int, within: str = "") -> TrainedOn:
    made = phase.checkpoint
    return TrainedOn(
        phase=phase.name,
        key=made.key,
        digest=made.digest,
        shard=shard,
        sequence=sequence,
        num_tokens=num_tokens,
        within=within,
    )


def _descendants(graph: ManifestGraph, versions: list[NamedVersion], digests: set[str]) -> Iterator[Descendant]:
    """The checkpoints with these digests and all that were started from them or learned their answers, with their
    registered versions."""
    made = _checkpoints(graph)
    teachers = {
        one.digest: {one.identity["inputs"]["start"], *(each.digest for each in experts_of(graph, one))} for one in made
    }
    reached = set(digests)
    while more := {digest for digest, own in teachers.items() if own & reached} - reached:
        reached |= more
    for checkpoint in (one for one in made if one.digest in reached):
        common: dict[str, Any] = {
            "phase": checkpoint.record["phase"],
            "key": checkpoint.key,
            "digest": checkpoint.digest,
        }
        registered = [version for version in versions if version.registered.tags.get(DIGEST_TAG) == checkpoint.digest]
        for version in registered:
            yield Descendant(**common, model=version.model, version=version.registered.version, aliases=version.aliases)
        if not registered:
            yield Descendant(**common, model="", version="", aliases=())


def _find(graph: ManifestGraph, manifest: Manifest, patterns: tuple[str, ...], identity: str) -> list[dict[str, Any]]:
    """Rows with an id in an artifact's Parquet files that match a pattern."""
    return find_rows(graph, manifest, patterns, {"id": [identity]}, COLUMNS)
