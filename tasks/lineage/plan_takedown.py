"""Plans a take-down: which texts are meant, where they are, which versions were trained on them, what a rebuild costs.

Reads manifests and the registry; changes nothing (flows/cli/evidence/forget_document.py does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from infra.registry.model_registry import CHAMPION, DIGEST_TAG, GGUF_TAG
from infra.registry.registered_versions import NamedVersion
from infra.step import Manifest
from infra.storage.manifest_graph import ManifestGraph
from tasks.data.filtering.blocked_documents import BLOCKED, DOCUMENT_ID, entry_of
from tasks.lineage.provenance import released_artifacts
from tasks.lineage.stored_rows import find_rows
from tasks.lineage.trace_document import FILES_FILE, Descendant, DocumentLineage, TrainedOn, trace_document

MAX_SHOWN = 8
TEXT_FILES = "documents/"
FILTER_STEP = "filter_documents"
DOCUMENT_STEPS = ("extract_documents", "remove_boilerplate", FILTER_STEP)
"""Steps whose documents/ are cut to their final pieces; a block list names these."""
DROPPING_STEPS = ("deduplicate_documents", "remove_semantic_duplicates")
REPORT_STEP, REPORT_FILE = "write_report", "report.html"
HOLDING_FILES = (f"{TEXT_FILES}*", "members.parquet", "examples.parquet")
"""Files with the id of each document whose text the step holds: as text, as tokens in shards, or its beginning."""


class Rerun(BaseModel):
    """A step that runs again when the text is gone."""

    step: str
    seconds: float
    """What it took the last time."""


class TakeDown(BaseModel):
    """The plan."""

    asked: str
    ids: tuple[str, ...]
    """All pieces of the records that were meant."""
    same: tuple[str, ...]
    """Other documents with the text of one of them: they are blocked, too."""
    entries: tuple[str, ...]
    """Lines of the block list besides what was asked."""
    blocked: tuple[str, ...]
    """Those of them that the block list has dropped in a run already."""
    copies: tuple[str, ...]
    """Near-duplicates that were kept in the place of one that is meant: they stay, unless asked for too."""
    resembling: tuple[str, ...]
    """Near-duplicates that were dropped in favour of one that is meant: one takes its place once its source is
    gone."""
    holders: tuple[str, ...]
    """Steps of this store whose files hold the text, each with the beginning of its key. The files stay until the
    artifact is removed; the source is the user's."""
    trained: tuple[TrainedOn, ...]
    models: tuple[Descendant, ...]
    reruns: tuple[Rerun, ...]
    """For the champion if it is one of the models, else for the newest; none where no phase was trained on the
    text."""

    def describe(self) -> str:
        """Lines for a terminal."""
        more = f" and {len(self.ids) - MAX_SHOWN:,} more" if len(self.ids) > MAX_SHOWN else ""
        lines = [f"{self.asked}: documents {', '.join(self.ids[:MAX_SHOWN])}{more}"]
        lines += [f"  held by {', '.join(self.holders)}"]
        lines += [f"  dropped as {BLOCKED} in an earlier run: {', '.join(self.blocked)}"] if self.blocked else []
        lines += [f"  the same text is in {identity}, which is meant, too" for identity in self.same]
        lines += [f"  a near-duplicate of it stays, unless you ask for it too: {identity}" for identity in self.copies]
        lines += [f"  a near-duplicate was dropped in favour of it: {identity}" for identity in self.resembling]
        tokens: Counter[str] = Counter()
        for use in self.trained:
            tokens[use.phase] += use.num_tokens
        lines += [f"  trained in {phase}: {count:,} tokens" for phase, count in tokens.items()]
        for model in self.models:
            named = f"{model.model} version {model.version}" if model.model else f"no version ({model.digest[:12]})"
            lines.append(f"  in {model.phase}: {named}{''.join(f' = {alias}' for alias in model.aliases)}")
        if not self.reruns:
            rest = ", but one may have been on what stays" if self.copies else ": nothing has to be rebuilt"
            return "\n".join([*lines, f"  no phase was trained on it{rest}"])
        seconds = sum(each.seconds for each in self.reruns)
        longest = sorted(self.reruns, key=lambda each: -each.seconds)[:3]
        most = ", ".join(f"{each.step} {each.seconds:,.1f} s" for each in longest)
        return "\n".join(
            [*lines, f"  a rebuild runs {len(self.reruns)} steps, which took {seconds:,.1f} s the last time: {most}"]
        )


def plan_takedown(graph: ManifestGraph, versions: list[NamedVersion], asked: str) -> TakeDown:
    """The plan for a document id or a URL. Raises ValueError for one that the store does not know, for what is no
    document, and for an empty one."""
    ids = _pieces(graph, versions, asked)
    if not ids:
        raise ValueError(
            f"store {graph.store.uri} holds no document from {asked}: give the URL as the source has it, or an id"
        )
    digests = {identity: _digests(graph, identity) for identity in ids}
    same = _with_digests(graph, {digest for each in digests.values() for digest in each}) - set(ids)
    meant = (*ids, *sorted(same))
    lineages = [trace_document(graph, versions, identity) for identity in meant]
    models = {(model.digest, model.version): model for each in lineages for model in each.models}
    return TakeDown(
        asked=asked,
        ids=ids,
        same=tuple(sorted(same)),
        entries=tuple(entry_of(identity, of_text) for identity, of_text in digests.items()),
        blocked=tuple(each.id for each in lineages if any(drop.reason == BLOCKED for drop in each.dropped)),
        copies=_kept_instead(lineages, meant),
        resembling=_dropped_instead(graph, meant),
        holders=tuple(f"{made.step} ({made.key[:12]})" for made in _holders(graph, meant)),
        trained=tuple(use for each in lineages for use in each.trained),
        models=tuple(models.values()),
        reruns=tuple(_reruns(graph, versions, tuple(models.values()))),
    )


def _pieces(graph: ManifestGraph, versions: list[NamedVersion], asked: str) -> tuple[str, ...]:
    """Ids of the documents at a URL, or of all pieces of a document's record."""
    if not DOCUMENT_ID.fullmatch(asked):
        return documents_at(graph, asked)
    places = trace_document(graph, versions, asked).places
    wrong = [place for place in places if place.kind not in ("record", "document")]
    if wrong:
        raise ValueError(
            f"{asked} is a {wrong[0].kind} of {wrong[0].source}, and the block list holds documents: take the record "
            f"out of its source and run again"
        )
    at = ({"source": [place.source], "offset": [place.offset]} for place in places)
    return tuple(sorted({identity for wanted in at for identity in _ids(graph, wanted)}))


def documents_at(graph: ManifestGraph, url: str) -> tuple[str, ...]:
    """Ids of the documents of a page. Raises ValueError for an empty URL, which all documents without a page have."""
    if not url.strip():
        raise ValueError("no document is asked for: give the URL as the source has it, or an id")
    return _ids(graph, {"url": [url]})


def _ids(graph: ManifestGraph, wanted: dict[str, Iterable[Any]]) -> tuple[str, ...]:
    """Ids of the final pieces that have the wanted values. A step that read another one's documents only dropped some:
    it is not read where the other one is there."""
    makers = {made.digest: made for made in graph.made_by(*DOCUMENT_STEPS)}
    earliest = [
        made
        for made in makers.values()
        if not any(each.digest in makers for each in graph.ancestors(made) if each.digest != made.digest)
    ]
    return tuple(sorted({row["id"] for made in earliest for row in _rows(graph, made, wanted)}))


def _rows(graph: ManifestGraph, made: Manifest, wanted: dict[str, Iterable[Any]]) -> list[dict[str, Any]]:
    return find_rows(graph, made, (f"{TEXT_FILES}*",), wanted, ("id",))


def _digests(graph: ManifestGraph, identity: str) -> tuple[str, ...]:
    """The digests of a document's text: another one where boilerplate was cut out of it."""
    found = (
        row.get("content_digest")
        for made in graph.made_by(*DOCUMENT_STEPS)
        for row in find_rows(graph, made, (f"{TEXT_FILES}*",), {"id": [identity]}, ("content_digest",))
    )
    return tuple(sorted({digest for digest in found if digest}))


def _with_digests(graph: ManifestGraph, digests: set[str]) -> set[str]:
    """Ids of the documents with these texts."""
    makers = graph.made_by(*DOCUMENT_STEPS) if digests else ()
    return {row["id"] for made in makers for row in _rows(graph, made, {"content_digest": digests})}


def _kept_instead(lineages: Iterable[DocumentLineage], meant: Iterable[str]) -> tuple[str, ...]:
    kept = {drop.kept_id for each in lineages for drop in each.dropped if "duplicate" in drop.reason and drop.kept_id}
    return tuple(sorted(kept - set(meant)))


def _dropped_instead(graph: ManifestGraph, meant: Iterable[str]) -> tuple[str, ...]:
    rows = (
        row
        for made in graph.made_by(*DROPPING_STEPS)
        for row in find_rows(graph, made, ("dropped.parquet",), {"kept_id": meant}, ("id",))
    )
    return tuple(sorted({row["id"] for row in rows} - set(meant)))


def _holders(graph: ManifestGraph, ids: tuple[str, ...]) -> list[Manifest]:
    """The steps with the text, in the order of their making: by itself, inside a repository, or quoted by a report."""
    repositories = (
        row["repository_id"]
        for made in graph.made_by("concatenate_repositories")
        for row in find_rows(graph, made, (FILES_FILE,), {"id": ids}, ("repository_id",))
    )
    named = {*ids, *repositories}
    steps = [made for made in graph.ancestors(*graph.by_digest.values()) if made.step != REPORT_STEP]
    reports = [made for found in graph.with_digest.values() for made in found if made.step == REPORT_STEP]
    return [made for made in (*steps, *reports) if _holds(graph, made, named)]


def _holds(graph: ManifestGraph, made: Manifest, ids: set[str]) -> bool:
    if made.step == REPORT_STEP and REPORT_FILE in made.evidence:
        report = graph.open(made).path(REPORT_FILE).read_text(encoding="utf-8")
        return any(identity in report for identity in ids)
    return bool(find_rows(graph, made, HOLDING_FILES, {"id": ids}, ("id",)))


def _reruns(graph: ManifestGraph, versions: list[NamedVersion], models: tuple[Descendant, ...]) -> Iterable[Rerun]:
    """The steps from the filter on that the champion, or the newest affected version, was made by."""
    digests = {model.digest for model in models}
    affected = [version for version in versions if version.registered.tags.get(DIGEST_TAG) in digests]
    affected.sort(key=lambda version: CHAMPION in version.aliases)
    if not affected:
        ends = [graph.by_digest[model.digest] for model in models[-1:]]
    elif GGUF_TAG in affected[-1].registered.tags:
        ends = list(released_artifacts(graph, affected[-1]).values())
    else:
        ends = [graph.by_digest[affected[-1].registered.digest]]
    changed: set[str] = set()
    for made in graph.ancestors(*ends):
        if made.step == FILTER_STEP or changed & set(made.identity["inputs"].values()):
            changed.add(made.digest)
            yield Rerun(step=made.step, seconds=made.seconds)
