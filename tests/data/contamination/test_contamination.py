"""What is trained on is searched for evaluation items after every step that makes some, and the bound refuses it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.files.stored_files import given_file
from configs.schema import ContaminationBound
from infra.home import Home
from infra.storage.local_store import LocalStore
from tasks.data.contamination.measure_contamination import measure_contamination
from tasks.data.decontamination.protected_items import protected_items
from tasks.data.problems.synthesize_problems import synthesize_problems
from tasks.data.records.documents import document_id
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tasks.release.decide_contamination import decide_contamination
from tests.support.data_inputs import RECIPE, RESOURCES, SYNTHESIS, compute, prose, rows, write_jsonl
from tests.support.evaluation_fakes import commit
from tests.support.reported_data import contamination

ROLES = """version: 1
entries:
  - {files: 'bench/**', role: evaluation}
  - {files: train.jsonl, role: pretrain}
"""
NUM_ITEMS = 40
ITEMS = [prose(100 + number, 30) for number in range(NUM_ITEMS)]
SPARE = [prose(200 + number, 60) for number in range(12)]


def artifact(directory, **tables):
    """What looks like an artifact with these tables, by the folder or file of each."""

    def files(pattern):
        name = pattern.partition("/")[0].partition(".")[0]
        return [given_file(directory / f"{name}.parquet")] if name in tables else []

    directory.mkdir()
    for name, table in tables.items():
        pq.write_table(pa.Table.from_pylist(table), directory / f"{name}.parquet")
    return SimpleNamespace(files=files, digest=directory.name)


def text(number, said, split="train"):
    return {"id": f"{number:016x}", "split": split, "text": said}


def turn(said):
    return {"role": "user", "reasoning": "", "content": said, "tool_calls": []}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One item is quoted in each kind of training text; others only in held-out text, or as a common phrase."""
    root = tmp_path_factory.mktemp("contamination")
    sources = root / "sources"
    write_jsonl(sources / "bench" / "many.jsonl", [{"text": item} for item in ITEMS])
    write_jsonl(sources / "bench" / "few.jsonl", [{"text": prose(300 + number, 30)} for number in range(2)])
    write_jsonl(sources / "train.jsonl", [{"text": "unused"}])
    (sources / "glm46-data.yaml").write_text(ROLES)
    ingested = compute(ingest_documents, root, sources=list_sources(sources), recipe=RECIPE.ingest, resources=RESOURCES)
    problems = compute(synthesize_problems, root, recipe=SYNTHESIS)
    chat = {"id": "c" * 16, "split": "train", "messages": json.dumps([turn(SPARE[3]), turn(ITEMS[2])])}
    held_out = {**chat, "id": "d" * 16, "split": "validation", "messages": json.dumps([turn(ITEMS[7])])}
    pair = {"id": "e" * 16, "split": "train", "prompt": json.dumps([turn(SPARE[4])])}
    pair |= {"chosen": json.dumps(turn(SPARE[5])), "rejected": json.dumps(turn(ITEMS[3]))}
    _, overlaps = protected_items(ingested, problems, RECIPE.decontaminate, RESOURCES)
    common = [{"id": f"{run:x}", "run": run} for run in overlaps.hits([ITEMS[6]]).runs.view(np.int64).tolist()]
    documents = [text(1, f"{SPARE[0]} {ITEMS[0]}"), text(2, ITEMS[5], "test"), text(3, f"{SPARE[1]} {ITEMS[6]}")]
    halves = ITEMS[1].split(" ")
    # Each file holds half an item: only the whole repository quotes it.
    repository = [text(4, f"{SPARE[2]} {' '.join(halves[:9])}\n{' '.join(halves[9:])} {SPARE[6]}")]
    given = {
        "documents": artifact(
            root / "documents", documents=documents, prompts=[{"id": "f" * 16, "prompt": ITEMS[4]}], common_runs=common
        ),
        "repositories": artifact(root / "repositories", documents=repository),
        "chats": artifact(root / "chats", chats=[chat, held_out]),
        "preferences": artifact(root / "preferences", pairs=[pair]),
    }
    return compute(
        measure_contamination,
        root,
        ingested=ingested,
        synthetic=problems,
        recipe=RECIPE.decontaminate,
        resources=RESOURCES,
        **given,
    )


def test_items_in_each_kind_of_training_text_are_named_and_held_out_text_is_not_looked_at(measured):
    found = rows(measured, "contaminated_items.parquet")
    offsets = [0]
    for item in ITEMS:
        offsets.append(offsets[-1] + len(json.dumps({"text": item})) + 1)
    where = {row["id"]: (row["kind"], row["text_id"]) for row in found}
    assert where == {
        document_id("bench/many.jsonl", offsets[number], 0): place
        for number, place in enumerate(
            [
                ("document", f"{1:016x}"),
                ("document", f"{4:016x}"),
                ("conversation", "c" * 16),
                ("preference pair", "e" * 16),
                ("prompt", "f" * 16),
            ]
        )
    }
    (whole,) = [row for row in found if row["text_id"] == f"{4:016x}"]
    assert whole["shared"].split()[0] in ITEMS[1] and whole["num_texts"] == 1


def test_the_source_with_the_largest_share_is_named(measured):
    record = measured.record
    assert (record.worst_source, record.worst_source_items, record.worst_source_contaminated) == (
        "bench/many.jsonl",
        NUM_ITEMS,
        5,
    )
    assert record.num_contaminated_items == 5 and record.contaminated_by_kind["document"] == 2
    shares = {
        row["source"]: (row["num_items"], row["num_contaminated"])
        for row in rows(measured, "contaminated_sources.parquet")
    }
    assert shares["bench/few.jsonl"] == (2, 0) and shares["bench/many.jsonl"] == (NUM_ITEMS, 5)


@pytest.mark.parametrize(("contaminated", "accepted"), [(0, True), (3, True), (4, False)])
def test_training_data_may_quote_so_much_of_one_source(tmp_path, contaminated, accepted):
    store = LocalStore(tmp_path / "store", Home(tmp_path))
    made = commit(
        store,
        decide_contamination,
        contamination=contamination(store, contaminated),
        recipe=ContaminationBound(max_contaminated_share=0.05),
    )
    assert made.record.accepted is accepted
    assert made.record.refusals == (
        ()
        if accepted
        else (
            "share of an evaluation source that training data quotes 0.0667, at most 0.05 allowed: 4 of 60 items of "
            "bench/quiz.jsonl; of all 71 items 4 in a conversation (contaminated_items.parquet of "
            "measure_contamination names each)",
        )
    )
