"""Which paragraphs the boilerplate step removes, against counting in plain Python."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tasks.data.extraction.paragraphs import ONLY_BOILERPLATE, frequent_keys, paragraph_hashes, split_paragraphs
from tasks.data.extraction.remove_boilerplate import remove_boilerplate
from tasks.data.records.documents import content_digest
from tests.support.data_inputs import RECIPE, RESOURCES, compute, in_partitions, prose, rows
from tests.support.document_tables import document_row, documents_artifact

NOTICE = "All rights reserved by the publisher of this site, see the terms."
RECIPE_4 = RECIPE.boilerplate.model_copy(
    update={"min_documents": 4, "min_words": 6, "min_remaining_chars": 40, "max_removed_share": 0.9}
)


def page(number: int, *lines: str, **given):
    return document_row("\n".join([prose(number).strip(), *lines]), number, url=f"https://site.org/{number}", **given)


def removed(documents, tmp_path, recipe=RECIPE_4, resources=RESOURCES):
    artifact = documents_artifact(documents, tmp_path / "documents.parquet")
    return compute(remove_boilerplate, tmp_path / "home", documents=artifact, recipe=recipe, resources=resources)


def test_removed_paragraphs_are_those_that_counting_finds(tmp_path):
    documents = [
        page(number, NOTICE if number % 2 else NOTICE.upper(), "Read more here now please, dear reader.")
        for number in range(8)
    ]
    documents += [page(number, "A line that only three of the documents have.") for number in range(8, 11)]
    documents += [page(11, *["Repeated inside one document, five times over."] * 5)]
    documents += [page(number, NOTICE, domain="code", collection="code") for number in range(12, 20)]
    documents += [page(number, NOTICE) | {"url": f"https://other.org/{number}"} for number in range(20, 23)]
    documents += [page(number, "See also") for number in range(23, 30)]
    result = removed(documents, tmp_path)
    documents_out = {row["id"]: row for row in rows(result, "documents/*.parquet")}
    expected, holders = {}, {}
    words = {row["id"]: [re.sub(r"\W+", " ", line.lower()) for line in row["text"].split("\n")] for row in documents}
    for row in documents:
        for line in set(words[row["id"]]) if row["domain"] != "code" else ():
            holders.setdefault((row["url"].split("/")[2], line), set()).add(row["id"])
    common = {key: ids for key, ids in holders.items() if len(ids) >= 4 and len(key[1].split()) >= 6}
    for row in documents:
        expected[row["id"]] = {line for (_, line), ids in common.items() if row["id"] in ids}
    kept_by = dict.fromkeys(common, 0)
    for row in documents:
        lost = set(words[row["id"]]) - {
            re.sub(r"\W+", " ", line.lower()) for line in documents_out[row["id"]]["text"].split("\n")
        }
        assert lost <= expected[row["id"]]
        for line in expected[row["id"]] - lost:
            kept_by[row["url"].split("/")[2], line] += 1
        now = documents_out[row["id"]]
        assert now["num_chars"] == len(now["text"]) and now["num_bytes"] == len(now["text"].encode())
        assert now["content_digest"] == content_digest(now["text"])
    assert len(common) == 2 and set(kept_by.values()) == {1}
    shown = rows(result, "boilerplate.parquet")
    assert [(row["num_documents"], row["collection"]) for row in shown] == [(8, "pages")] * 2
    assert {row["text"].lower() for row in shown} == {NOTICE.lower(), "read more here now please, dear reader."}
    assert result.record.num_paragraphs == 2 and 7 <= result.record.num_changed <= 8 and result.record.dropped == {}


def test_wrapped_texts_are_cut_at_blank_lines_and_others_at_lines():
    assert split_paragraphs("one\ntwo\n\nthree")[0] == ["one\ntwo", "three"]
    assert split_paragraphs(f"one\ntwo\n\n{'long ' * 40}")[0] == ["one", "two", "", "long " * 40]
    assert split_paragraphs("one\ntwo")[0] == ["one", "two"]


def test_paragraph_hashes_tell_order_and_length_and_nothing_else():
    hashes, counts = paragraph_hashes(
        ["One two, three!", "one  TWO three", "one three two", "one two", "", "one two three three", "..."]
    )
    assert hashes[0] == hashes[1] and len(set(hashes.tolist())) == 5
    assert counts.tolist() == [3, 3, 3, 2, 0, 4, 0]


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 7, 100])
def test_frequent_keys_do_not_depend_on_batches(batch_rows):
    import pyarrow as pa

    generator = np.random.Generator(np.random.Philox(3))
    keys, records = np.sort(generator.integers(-5, 5, 60)), generator.integers(0, 6, 60)
    order = np.lexsort((records, keys))
    table = pa.table({"key": keys[order], "record": records[order], "id": [f"{n:02d}" for n in range(60)]})
    got = [row for batch in frequent_keys(iter(table.to_batches(batch_rows)), 4) for row in batch.to_pylist()]
    by_key = {
        key: sorted({int(r) for k, r in zip(keys[order], records[order], strict=True) if k == key})
        for key in keys.tolist()
    }
    wanted = [
        row for row in table.to_pylist() if len(by_key[row["key"]]) >= 4 and row["record"] != by_key[row["key"]][0]
    ]
    assert got == wanted and 0 < len(got) < 60


def test_copies_leave_one_whole_text_and_the_others_have_a_reason(tmp_path):
    text = "\n".join(prose(seed).strip().replace("\n", " ") for seed in range(3))
    copies = [document_row(f"{text}\nCopy {number}", number, url="https://site.org/") for number in range(6)]
    result = removed([*copies, *[page(number) for number in range(50, 53)]], tmp_path)
    left = [row["text"] for row in rows(result, "documents/*.parquet")]
    assert "\n".join(left).count(prose(0).strip()) == 1
    assert set(result.record.dropped) <= {ONLY_BOILERPLATE} and result.record.dropped[ONLY_BOILERPLATE] >= 3
    assert result.record.num_documents == 9 - result.record.dropped[ONLY_BOILERPLATE]


def test_pieces_of_one_record_are_one_document(tmp_path):
    pieces = [page(number, NOTICE) | {"source": "book.txt", "offset": 0, "piece": number} for number in range(6)]
    result = removed(pieces, tmp_path)
    assert result.record.num_changed == 0 and rows(result, "boilerplate.parquet") == []


def test_result_does_not_depend_on_partitions(tmp_path):
    documents = [
        page(number, NOTICE, f"A second notice that every third has: {number % 3} and more.") for number in range(30)
    ]
    results = [removed(documents, tmp_path / str(parts), resources=in_partitions(parts)) for parts in (1, 4)]
    assert results[0].digest == results[1].digest and results[0].record.num_paragraphs == 4


def test_a_collection_that_loses_too_much_stops_the_run_with_examples(tmp_path):
    documents = [page(number, *[f"{NOTICE} Part {part}." for part in range(4)]) for number in range(24)]
    share = 1 - sum(len(prose(number).strip().encode()) for number in range(24)) / sum(
        row["num_bytes"] for row in documents
    )
    removed(documents, tmp_path, RECIPE_4.model_copy(update={"max_removed_share": share}))
    with pytest.raises(
        ValueError, match=r"source pages: .*max_removed_share.*All rights reserved.* in 24 documents \(pages.warc\)"
    ):
        removed(documents, tmp_path / "strict", RECIPE_4.model_copy(update={"max_removed_share": share * 0.9}))
