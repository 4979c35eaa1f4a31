"""Lists what may not be trained on: every record of role `evaluation`, and the problems that gate promotion.

The gold patches of prompts like `code/swe_tasks` also occur among commits. They are prompts, so they are trained on
like commits. To evaluate with such tasks, give their file the role `evaluation`: then their added lines are protected
like those of any change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from infra.machine.spark import spark_session
from tasks.data.decontamination.item_names import PROBLEM, ProtectedItems
from tasks.data.decontamination.item_views import ASKED, CUED, INCIDENTAL, PROGRAM, views
from tasks.data.decontamination.overlap import (
    MIN_WORDS_OF_PROBLEM,
    MIN_WORDS_OF_TEXT,
    OverlapIndex,
    ProtectedTexts,
    Protection,
    build_index,
)
from tasks.data.privacy.personal_data import KINDS, find_in_chunks, mask_text
from tasks.data.problems.environment_tasks import HELD_OUT_TASK_SOURCE
from tasks.data.problems.synthesize_problems import EVALUATION_SOURCE, HELD_OUT_SOURCE, SAFETY_SOURCE
from tasks.data.records.document_files import read_documents
from tasks.data.records.documents import document_id

if TYPE_CHECKING:
    from configs.schema import DecontaminationRecipe, SparkResources
    from infra.step import Artifact
    from tasks.data.problems.synthesize_problems import SynthesizedProblems
    from tasks.data.sources.ingest_documents import IngestedDocuments

Problem = tuple[str, str, int, list[str]]
"""(id, source, number, texts)"""
WHOLE = 1 << 30
"""Words per n-gram of generated problems: they are protected only as a whole, since all problems of a kind share their
wording."""


def protected_items(
    ingested: Artifact[IngestedDocuments],
    synthetic: Artifact[SynthesizedProblems] | None,
    recipe: DecontaminationRecipe,
    resources: SparkResources,
) -> tuple[ProtectedItems, OverlapIndex]:
    """The items and what texts are looked up in."""
    return index_items(_records(ingested, resources), () if synthetic is None else _problems(synthetic), recipe)


def index_items(
    records: Iterable[Mapping[str, Any]], problems: Iterable[Problem], recipe: DecontaminationRecipe
) -> tuple[ProtectedItems, OverlapIndex]:
    """The items and the index of records (id, source, offset, text, markup) and problems."""
    items = ProtectedItems([], [], [], [])
    size = recipe.ngram_size
    groups = {
        ASKED: ProtectedTexts([], [], Protection(MIN_WORDS_OF_TEXT, size, False, is_known_from_parts=True)),
        CUED: ProtectedTexts([], [], Protection(MIN_WORDS_OF_TEXT, size, False)),
        INCIDENTAL: ProtectedTexts([], [], Protection(size, size, False)),
        PROGRAM: ProtectedTexts([], [], Protection(size, recipe.code_ngram_size, False)),
        PROBLEM: ProtectedTexts([], [], Protection(MIN_WORDS_OF_PROBLEM, WHOLE, True)),
    }
    for row in records:
        kind, texts_of_record = views(row["text"], row["markup"])
        for text, role in texts_of_record:
            _protect(groups[role], text, items.count)
        _append(items, row["id"], kind, row["source"], row["offset"])
    for group in groups.values():
        _protect_masked(group)
    for identity, source, number, texts in problems:
        for text in texts:
            _protect(groups[PROBLEM], text, items.count)
        _append(items, identity, PROBLEM, source, number)
    return items, build_index(list(groups.values()), recipe.max_items_per_run)


def _protect(group: ProtectedTexts, text: str, item: int) -> None:
    group.texts.append(text)
    group.items.append(item)


def _protect_masked(group: ProtectedTexts) -> None:
    """Protect texts with personal data also in their masked forms, as prose and as code: documents are masked before
    they are looked up."""
    for is_code in (False, True):
        spans = find_in_chunks(group.texts, [is_code] * len(group.texts), KINDS)
        masked = [
            (mask_text(text, own), item) for text, item, own in zip(group.texts, group.items, spans, strict=True) if own
        ]
        for text, item in masked:
            _protect(group, text, item)


def _append(items: ProtectedItems, identity: str, kind: str, source: str, offset: int) -> None:
    items.ids.append(identity)
    items.kinds.append(kind)
    items.sources.append(source)
    items.offsets.append(offset)


def _records(ingested: Artifact[IngestedDocuments], resources: SparkResources) -> list[dict[str, Any]]:
    files = ingested.files("evaluation/*.parquet")
    read = read_documents(spark_session(resources), files, resources, "id", "source", "offset", "text", "markup")
    return read.toArrow().sort_by("id").to_pylist()


def _problems(synthetic: Artifact[SynthesizedProblems]) -> Iterator[Problem]:
    """The evaluated problems, each with its answer and as a question, the held-out questions of the other families, the
    held-out tasks, and the held-out requests."""
    import pyarrow.parquet as pq

    tables = {EVALUATION_SOURCE: "problems.parquet", HELD_OUT_SOURCE: "held_out.parquet"}
    tables |= {HELD_OUT_TASK_SOURCE: "held_out_tasks.parquet", SAFETY_SOURCE: "safety.parquet"}
    for source, name in tables.items():
        rows = pq.read_table(synthetic.path(name)).sort_by("id").to_pylist()
        numbers = {document_id(source, number, 0): number for number in range(len(rows))}
        for row in rows:
            texts = [row["prompt"] + row["answer"], row["question"]] if source == EVALUATION_SOURCE else [row["prompt"]]
            yield row["id"], source, numbers[row["id"]], texts
