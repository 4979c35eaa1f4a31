"""The filter step on scored documents: each bound on both sides, what has no score, exact buckets, all of it whatever the partitions."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.step import Output, Record, step
from tasks.data.document_files import names_of
from tasks.data.documents import DOCUMENT_COLUMNS, SCORE_COLUMNS, arrow_schema, content_digest, document_id
from tasks.data.filter_documents import filter_documents
from tasks.data.score_bounds import bucket_floors
from tests.data_inputs import RECIPE, compute, in_partitions, prose, rows

FILTER = RECIPE.filter
SCORES = FILTER.scores.model_copy(
    update={
        "allowed_languages": ("en", "de"),
        "min_language_score": 0.65,
        "max_toxicity": 0.3,
        "max_perplexity": 500.0,
        "min_factuality": 0.7,
    }
)
GOOD = {"language": "en", "language_score": 0.65, "quality": None, "toxicity": 0.3, "perplexity": 500.0, "factuality": 0.7}
SIDES = {
    "wrong_language": ({"language": "de"}, {"language": "fr"}),
    "language_uncertain": ({"language_score": None}, {"language_score": 0.64}),
    "toxic": ({"toxicity": 0.1}, {"toxicity": 0.31}),
    "perplexing": ({"perplexity": None}, {"perplexity": 500.1}),
    "not_factual": ({"factuality": 0.9}, {"factuality": 0.69}),
}
NUM_SCORED = 103
SCHEMA = arrow_schema(f"{DOCUMENT_COLUMNS}, cluster string, split string, {SCORE_COLUMNS}")


class ToyDocuments(Record):
    num_documents: int
    num_bytes: int


def document(number: int, domain: str, scores: dict) -> dict:
    text = prose(number, 60)
    return {
        "id": document_id("toy", number, 0), "source": "toy", "offset": number, "piece": 0, "collection": "toy", "url": "", "licence": "",
        "domain": domain, "lang": "en", "repository": "", "path": "", "text": text, "content_digest": content_digest(text),
        "num_chars": len(text), "num_bytes": len(text.encode()), "cluster": "", "split": "train", **scores,
    }  # fmt: skip


def toy_documents() -> list[dict]:
    given = [scores for pair in SIDES.values() for scores in pair]
    found = [document(number, "web", GOOD | scores) for number, scores in enumerate(given)]
    found += [document(100 + number, "code", dict.fromkeys(GOOD) | {"quality": 0.0, "toxicity": 1.0}) for number in range(3)]
    found.append(document(150, "math", GOOD | {"toxicity": 1.0}))
    qualities = np.random.default_rng(1).random(NUM_SCORED)
    found += [document(200 + number, "web", GOOD | {"quality": float(quality)}) for number, quality in enumerate(qualities)]
    return found


@step(content=("documents/*.parquet",))
def write_documents(*, output: Output) -> ToyDocuments:
    table = pa.Table.from_pylist(sorted(toy_documents(), key=lambda row: row["id"]), schema=SCHEMA)
    pq.write_table(table, output.path("documents/part-00000.parquet"))
    return ToyDocuments(num_documents=table.num_rows, num_bytes=sum(table["num_bytes"].to_pylist()))


@pytest.fixture(scope="module")
def filtered(tmp_path_factory):
    root = tmp_path_factory.mktemp("filter")
    recipe = FILTER.model_copy(update={"scores": SCORES, "num_quality_buckets": 5, "num_dropped_buckets": 1,
                                       "heuristics": FILTER.heuristics.model_copy(update={"min_stop_words": 0})})  # fmt: skip
    source = compute(write_documents, root)

    def run(partitions: int):
        return compute(filter_documents, root / str(partitions), documents=source, recipe=recipe, resources=in_partitions(partitions))

    return run


@pytest.fixture(scope="module")
def one(filtered):
    return filtered(2)


def test_each_score_drops_on_one_side_of_its_bound_and_keeps_on_the_other(one):
    dropped = {row["id"]: row["reason"] for row in rows(one, "dropped.parquet")}
    for place, reason in enumerate(SIDES):
        inside, outside = (document_id("toy", 2 * place + side, 0) for side in (0, 1))
        assert inside not in dropped and dropped[outside] == reason


def test_what_has_no_score_is_kept_and_counted(one):
    kept = {row["id"]: row for row in rows(one, "documents/*.parquet")}
    assert one.record.unscored == {
        "language": 0, "language_score": 1, "quality": 11, "toxicity": 0, "perplexity": 1, "factuality": 0,
    }  # fmt: skip
    code = [kept[document_id("toy", 100 + number, 0)] for number in range(3)]
    assert [row["quality_bucket"] for row in code] == [-1, -1, -1]
    assert kept[document_id("toy", 150, 0)]["toxicity"] == 1.0
    assert one.record.documents_by_bucket == {-1: 9, 1: 20, 2: 21, 3: 20, 4: 21}


def test_buckets_are_exact_quantiles_and_the_lowest_is_dropped(one):
    dropped = {row["id"] for row in rows(one, "dropped.parquet") if row["reason"] == "low_quality_bucket"}
    kept = {row["id"]: row["quality_bucket"] for row in rows(one, "documents/*.parquet")}
    ranked = sorted(
        (row for row in toy_documents() if row["quality"] is not None and row["domain"] == "web"), key=lambda row: row["quality"]
    )
    for rank, row in enumerate(ranked):
        bucket = (2 * rank + 1) * 5 // (2 * NUM_SCORED)
        assert (row["id"] in dropped) if bucket == 0 else kept[row["id"]] == bucket
    assert one.record.dropped["low_quality_bucket"] == len(dropped) == 21
    assert set(names_of("text string, quality double, quality_bucket int")) <= set(rows(one, "documents/*.parquet")[0])


def test_examples_show_the_text_of_what_was_dropped(one):
    examples = rows(one, "examples.parquet")
    texts = {row["id"]: row["text"] for row in toy_documents()}
    assert {row["reason"] for row in examples} == set(one.record.dropped)
    assert all(texts[row["id"]].startswith(row["text"]) and row["text"] for row in examples)
    assert sum(row["reason"] == "low_quality_bucket" for row in examples) == 5


def test_the_digest_is_the_same_for_any_number_of_partitions(filtered, one):
    assert filtered(5).digest == one.digest


def test_equal_qualities_stay_together_and_take_the_middle_bucket():
    assert bucket_floors([(7, 100)], 5) == [7, 7, 1_000_001, 1_000_001]
    assert bucket_floors([(quality, 1) for quality in (30, 10, 20, 40)], 2) == [30]
    assert bucket_floors([(1, 90), (2, 10)], 2) == [2]


def test_more_dropped_buckets_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"num_dropped_buckets \(5\) must stay below num_quality_buckets \(5\)"):
        type(FILTER)(**json.loads(FILTER.model_dump_json()) | {"num_quality_buckets": 5, "num_dropped_buckets": 5})
