"""The filter step on scored documents: each bound on both sides, what has no score, exact buckets, all of it whatever
the partitions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import FilterRecipe
from infra.step import Artifact, Output, Record, step
from tasks.data.filtering.blocked_documents import BLOCKED, BlockedDocuments, entry_of, read_block_list
from tasks.data.filtering.filter_documents import FilteredDocuments, _bounds_of, filter_documents
from tasks.data.filtering.heuristics import RULES
from tasks.data.filtering.score_bounds import BOUND_OF, LOW_QUALITY, bucket_floors
from tasks.data.records.documents import (
    DOCUMENT_COLUMNS,
    SCORE_COLUMNS,
    arrow_schema,
    content_digest,
    document_id,
    names_of,
)
from tests.conftest import ROOT
from tests.support.data_inputs import RECIPE, compute, in_partitions, prose, rows
from tests.support.document_tables import document_row, documents_artifact

FILTER = RECIPE.filter
SCORES = FILTER.scores.model_copy(
    update={
        "allowed_languages": ("en", "de"),
        "min_language_score": 0.65,
        "max_toxicity": 0.3,
        "max_perplexity_percentile": 0.99,
        "min_factuality": 0.7,
    }
)
GOOD = {
    "language": "en",
    "language_score": 0.65,
    "quality": None,
    "toxicity": 0.3,
    "perplexity": 500.0,
    "perplexity_percentile": 0.99,
    "factuality": 0.7,
}
SIDES = {
    "wrong_language": ({"language": "de"}, {"language": "fr"}),
    "language_uncertain": ({"language_score": None}, {"language_score": 0.64}),
    "toxic": ({"toxicity": 0.1}, {"toxicity": 0.31}),
    "perplexing": ({"perplexity": None, "perplexity_percentile": None}, {"perplexity_percentile": 0.995}),
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
        "id": document_id("toy", number, 0),
        "source": "toy",
        "offset": number,
        "piece": 0,
        "collection": "toy",
        "url": f"https://toy.example/{number}",
        "licence": "",
        "domain": domain,
        "lang": "en",
        "repository": "",
        "path": "",
        "text": text,
        "content_digest": content_digest(text),
        "num_chars": len(text),
        "num_bytes": len(text.encode()),
        "cluster": "",
        "split": "train",
        **scores,
    }


def toy_documents() -> list[dict]:
    given = [scores for pair in SIDES.values() for scores in pair]
    documents = [document(number, "web", GOOD | scores) for number, scores in enumerate(given)]
    documents += [
        document(100 + number, "code", dict.fromkeys(GOOD) | {"quality": 0.0, "toxicity": 1.0}) for number in range(3)
    ]
    documents.append(document(150, "math", GOOD | {"toxicity": 1.0, "perplexity_percentile": 1.0}))
    qualities = np.random.default_rng(1).random(NUM_SCORED)
    documents += [
        document(200 + number, "web", GOOD | {"quality": float(quality)}) for number, quality in enumerate(qualities)
    ]
    return documents


@step(content=("documents/*.parquet",))
def write_documents(*, output: Output) -> ToyDocuments:
    table = pa.Table.from_pylist(sorted(toy_documents(), key=lambda row: row["id"]), schema=SCHEMA)
    pq.write_table(table, output.path("documents/part-00000.parquet"))
    return ToyDocuments(num_documents=table.num_rows, num_bytes=sum(table["num_bytes"].to_pylist()))


@pytest.fixture(scope="module")
def filtered(tmp_path_factory):
    root = tmp_path_factory.mktemp("filter")
    recipe = FILTER.model_copy(
        update={
            "scores": SCORES,
            "num_quality_buckets": 5,
            "num_dropped_buckets": 1,
            "heuristics": FILTER.heuristics.model_copy(update={"min_stop_words": 0}),
        }
    )
    source = compute(write_documents, root)

    def run(partitions: int, blocked: BlockedDocuments | None = None, extracted: Artifact[ToyDocuments] | None = None):
        return compute(
            filter_documents,
            root / str(partitions),
            documents=source,
            extracted=extracted,
            blocked=blocked,
            recipe=recipe,
            resources=in_partitions(partitions),
        )

    return run


@pytest.fixture(scope="module")
def one(filtered):
    return filtered(2)


def test_each_score_drops_on_one_side_of_its_bound_and_keeps_on_the_other(one):
    dropped = {row["id"]: row["reason"] for row in rows(one, "dropped.parquet")}
    for number, reason in enumerate(SIDES):
        inside, outside = (document_id("toy", 2 * number + side, 0) for side in (0, 1))
        assert inside not in dropped and dropped[outside] == reason


def test_what_has_no_score_is_kept_and_counted(one):
    kept = {row["id"]: row for row in rows(one, "documents/*.parquet")}
    assert one.record.unscored == {
        "language": 0,
        "language_score": 1,
        "quality": 11,
        "toxicity": 0,
        "perplexity": 1,
        "factuality": 0,
    }
    code = [kept[document_id("toy", 100 + number, 0)] for number in range(3)]
    assert [row["quality_bucket"] for row in code] == [-1, -1, -1]
    assert one.record.documents_by_bucket == {-1: 9, 1: 20, 2: 21, 3: 20, 4: 21}


def test_buckets_are_exact_quantiles_and_the_lowest_is_dropped(one):
    dropped = {row["id"] for row in rows(one, "dropped.parquet") if row["reason"] == "low_quality_bucket"}
    kept = {row["id"]: row["quality_bucket"] for row in rows(one, "documents/*.parquet")}
    ranked = sorted(
        (row for row in toy_documents() if row["quality"] is not None and row["domain"] == "web"),
        key=lambda row: row["quality"],
    )
    for rank, row in enumerate(ranked):
        bucket = (2 * rank + 1) * 5 // (2 * NUM_SCORED)
        assert (row["id"] in dropped) if bucket == 0 else kept[row["id"]] == bucket
    assert one.record.dropped["low_quality_bucket"] == len(dropped) == 21
    assert set(names_of("text string, quality double, quality_bucket int")) <= set(rows(one, "documents/*.parquet")[0])


def test_what_the_block_list_names_is_dropped_and_nothing_else_and_its_text_is_no_example(filtered, one, tmp_path):
    ids = [document_id("toy", number, 0) for number in (100, 101)]
    path = tmp_path / "blocked.txt"
    path.write_text(f"# asked for by its author\n{ids[0]}\n\n https://toy.example/101 \nhttps://toy.example/1000\n")
    listed = read_block_list(tmp_path, "blocked.txt")
    path.write_text(f"https://toy.example/1000\nhttps://toy.example/101\n{ids[0]}\n")
    assert listed == read_block_list(Path("/"), str(path)), "in any order, with a relative or an absolute path"
    blocked = filtered(1, listed)
    kept, all_kept = ({row["id"] for row in rows(made, "documents/*.parquet")} for made in (blocked, one))
    assert kept == all_kept - set(ids) and blocked.key != one.key
    dropped = {row["id"]: row["reason"] for row in rows(blocked, "dropped.parquet")}
    assert [dropped[identity] for identity in ids] == ["blocked"] * 2 and blocked.record.dropped["blocked"] == 2
    assert not {row["id"] for row in rows(blocked, "examples.parquet")} & set(ids)


def test_an_entry_with_a_digest_means_its_text_at_any_position(filtered, one, tmp_path):
    """As after an edit of the source: the text has another id, and the id another text."""
    moved, stranger, old = (document_id("toy", number, 0) for number in (100, 101, 102))
    digest = content_digest(prose(100, 60))
    (tmp_path / "blocked.txt").write_text(f"{stranger} sha256:{digest} sha256:{'0' * 64}\n{old}\n")
    listed = read_block_list(tmp_path, "blocked.txt")
    assert listed == BlockedDocuments(ids=(old,), urls=(), digests=("0" * 64, digest))
    assert listed.missing((entry_of(moved, (digest,)), entry_of(old, ()), entry_of(moved, ("1" * 64,)))) == [
        f"{moved} sha256:{'1' * 64}"
    ]
    kept, all_kept = ({row["id"] for row in rows(made, "documents/*.parquet")} for made in (filtered(1, listed), one))
    assert all_kept - kept == {moved, old}


def test_a_digest_means_the_text_as_extracted_whichever_paragraphs_are_boilerplate_today(filtered, one, tmp_path):
    """Another file of the collection may share a paragraph, which is cut from then on."""
    number = 100
    whole = document(number, "code", {}) | {
        "content_digest": content_digest(f"{prose(number, 60)} A shared paragraph.")
    }
    listed = BlockedDocuments(ids=(), urls=(), digests=(whole["content_digest"],))
    extracted = documents_artifact([whole], tmp_path / "extracted.parquet")
    assert filtered(1, listed).record == one.record, "the texts of today have other digests"
    kept, all_kept = (
        {row["id"] for row in rows(made, "documents/*.parquet")} for made in (filtered(1, listed, extracted), one)
    )
    assert all_kept - kept == {whole["id"]}


def test_a_block_list_that_cannot_be_read_is_one_sentence(tmp_path):
    assert read_block_list(tmp_path, "none.txt") is None
    with pytest.raises(ValueError, match=r"block_list .*none.txt does not exist: make the file, or name another"):
        read_block_list(tmp_path, str(tmp_path / "none.txt"))
    (tmp_path / "list.txt").write_text("# nothing yet\n")
    assert read_block_list(tmp_path, "list.txt") is None
    (tmp_path / "list.txt").write_text("0123456789abcdef sha256:0123\n")
    with pytest.raises(ValueError, match=r"list.txt, line 1: '0123456789abcdef sha256:0123' is neither the id"):
        read_block_list(tmp_path, "list.txt")
    (tmp_path / "list.txt").write_text("0123456789abcdef\n0123456789abcde\n")
    with pytest.raises(ValueError, match=r"list.txt, line 2: '0123456789abcde' is neither the id of a document"):
        read_block_list(tmp_path, "list.txt")


def test_the_lowest_bucket_of_good_text_stays(tmp_path):
    """Twenty documents are the lowest of a hundred; those whose quality is above the bound are good all the same."""
    low = [{"quality": 0.5} for _ in range(7)] + [{"quality": 0.500001} for _ in range(13)]
    documents = [{**row, **given} for row, given in zip(sources_of(0), [*low, *({"quality": 0.9},) * 80], strict=True)]
    changed = {"heuristics": STRICT, "num_quality_buckets": 5, "num_dropped_buckets": 1, "max_dropped_quality": 0.5}
    record = ceiling(tmp_path, documents, FILTER.model_copy(update=changed))
    assert record.dropped == {"low_quality_bucket": 7} and record.documents_by_bucket[0] == 13


def test_mathematics_is_judged_by_neither_toxicity_nor_perplexity(one):
    assert document_id("toy", 150, 0) in {row["id"] for row in rows(one, "documents/*.parquet")}


def ceiling(path: Path, documents: list[dict], recipe: FilterRecipe) -> FilteredDocuments:
    source = documents_artifact(documents, path / "documents.parquet")
    given = {"documents": source, "extracted": None, "blocked": None, "recipe": recipe, "resources": in_partitions(2)}
    return compute(filter_documents, path / "home", **given).record


STRICT = FILTER.heuristics.model_copy(update={"max_curly_bracket_share": 0.0, "min_stop_words": 0})
BRACED = prose(3, 60) + "It ends {here}."


def sources_of(num_braced: int, collection: str = "pages", domain: str = "web", language: str = "en") -> list[dict]:
    """Forty documents of one group, of which some break the bound on curly brackets, beside sixty of another."""
    given = {"source": f"{collection}.jsonl", "collection": collection, "domain": domain, "language": language}
    texts = [BRACED if number < num_braced else prose(number, 60) for number in range(40)]
    rows_of = [document_row(text, number, **given) for number, text in enumerate(texts)]
    return rows_of + [
        document_row(prose(100 + number, 60), number, source="rest.jsonl", collection="rest") for number in range(60)
    ]


@pytest.mark.parametrize(
    ("group", "named"),
    [
        ({"collection": "books"}, "source books"),
        pytest.param({"domain": "medical"}, "domain medical", marks=pytest.mark.long),
        pytest.param({"language": "de"}, "language de", marks=pytest.mark.long),
    ],
)
def test_a_bound_that_removes_most_of_a_group_stops_the_run_and_is_named(group, named, tmp_path):
    recipe = FILTER.model_copy(update={"heuristics": STRICT, "max_removed_share": 0.5})
    message = (
        rf"{named}: 21 of 40 documents are dropped as curly_brackets \(heuristics.max_curly_bracket_share: 0.0\), "
        rf"more than filter.max_removed_share \(0.5\) allows.*for example \w+.jsonl, offset \d+ \('{BRACED[:20]}.*then "
        rf"change that bound"
    )
    # One collection holds all, where the group is not the collection.
    documents = sources_of(21, **group)
    if "collection" not in group:
        documents = [{**row, "collection": "all"} for row in documents]
    with pytest.raises(ValueError, match=message):
        ceiling(tmp_path / "above", documents, recipe)
    assert ceiling(tmp_path / "at", sources_of(20, **group), recipe).dropped == {"curly_brackets": 20}


@pytest.mark.parametrize(
    ("scores", "named"),
    [
        ({"perplexity": 9.0, "perplexity_percentile": 1.0}, r"perplexing \(scores.max_perplexity_percentile: 0.99\)"),
        ({"toxicity": 0.9}, r"toxic \(scores.max_toxicity: 0.3\)"),
        (
            {"quality": 0.0},
            r"low_quality_bucket \(num_dropped_buckets: 1 of num_quality_buckets: 5, max_dropped_quality: 0.5\)",
        ),
        ({"language_score": 0.1}, r"language_uncertain \(scores.min_language_score: 0.65\)"),
    ],
)
def test_scores_and_buckets_are_held_to_the_ceiling(scores, named, tmp_path):
    """All of one source goes: the twenty worst of a hundred, or those beyond a bound."""
    given = [{"quality": 0.5 + number / 1000} for number in range(100)]
    documents = sources_of(0)
    bad = [{**row, "quality": 0.9, **scores} for row in documents[:20]]
    rest = [{**row, **quality} for row, quality in zip(documents[40:], given, strict=False)]
    recipe = FILTER.model_copy(
        update={"scores": SCORES, "heuristics": STRICT, "max_removed_share": 0.9, "num_dropped_buckets": 1}
    )
    with pytest.raises(ValueError, match=f"source pages: 20 of 20 documents are dropped as {named}"):
        ceiling(tmp_path, [*bad, *rest], recipe)


def test_languages_that_are_not_wanted_may_go_whole(tmp_path):
    recipe = FILTER.model_copy(update={"scores": SCORES, "heuristics": STRICT, "max_removed_share": 0.1})
    assert ceiling(tmp_path, sources_of(0, collection="french", language="fr"), recipe).dropped["wrong_language"] == 40


def test_where_one_language_has_a_model_its_text_does_not_vanish_beside_foreign_text(tmp_path):
    documents = sources_of(0, language="de")
    english = [{**row, "perplexity": 2000.0, "perplexity_percentile": 1.0} for row in documents[40:]]
    recipe = FILTER.model_copy(update={"scores": SCORES, "heuristics": STRICT})
    with pytest.raises(ValueError, match=r"60 of 60 documents are dropped as perplexing"):
        ceiling(tmp_path, documents[:40] + english, recipe)


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


def test_the_page_names_every_reason_beside_the_key_that_decides_it():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").split("**Reasons**, ")[1].split("**Evidence.**")[0]
    keys = {}
    for reasons, named in re.findall(r"^\| (`.+) \| (.+) \|$", page, re.M):
        keys |= {reason: set(re.findall(r"`([\w.]+)`", named)) for reason in re.findall(r"`(\w+)`", reasons)}
    judged = {*(rule.reason for rule in RULES), *BOUND_OF, LOW_QUALITY}
    assert keys.keys() == judged | {BLOCKED}
    for reason in judged:
        causes = re.findall(r"(?:^|, )([a-z_.]+?)(?:\.\d)?: ", _bounds_of(reason, FILTER))
        assert causes and set(causes) <= keys[reason], reason
