"""Deduplication as a step: against brute force, on both sides of every rule, the same for any partitions, and against
earlier crawls."""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from tasks.data.deduplication.deduplicate_documents import deduplicate_documents
from tasks.data.deduplication.earlier_documents import EarlierDocuments, list_earlier_documents
from tasks.data.deduplication.edge_components import smallest_members
from tasks.data.deduplication.minhash import jaccard_counts, shingle_sets
from tasks.data.deduplication.page_urls import normalised_urls
from tasks.data.deduplication.signature_index import SignatureIndex
from tasks.data.records.documents import document_id
from tasks.data.records.removed_share import MIN_JUDGED_DOCUMENTS
from tasks.data.text.words import _tables
from tests.data.deduplication.test_minhash import edited, near_copies, plain_similarity
from tests.support.data_inputs import RECIPE, RESOURCES, compute, in_partitions, prose, rows
from tests.support.given_documents import given_document, given_documents

DEDUPLICATE = RECIPE.deduplicate.model_copy(update={"num_permutations": 128, "max_cluster_share": 1.0})
NONE = EarlierDocuments([], [])


def deduplicated(root, documents, recipe=DEDUPLICATE, previous=NONE, resources=RESOURCES):
    source = given_documents(root / "given.parquet", documents)
    return compute(deduplicate_documents, root, documents=source, previous=previous, recipe=recipe, resources=resources)


def directory_of(artifact):
    """Where the files of an artifact lie."""
    return artifact.directory("documents").parent


def kept_and_dropped(result):
    kept = {row["id"]: row for row in rows(result, "documents/*.parquet")}
    dropped = {row["id"]: row for row in rows(result, "dropped.parquet")}
    assert not set(kept) & set(dropped) and Counter(row["reason"] for row in dropped.values()) == result.record.dropped
    return kept, dropped


@pytest.fixture(scope="module")
def corpus():
    """Near copies, exact copies, a chain A ~ B ~ C, and one document without any word."""
    texts = [
        *near_copies(),
        *(prose(seed, 150) for seed in range(100, 130)),
        prose(100, 150),
        prose(101, 150),
        "... !!! ...",
    ]
    return [given_document(text, number) for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def crawl(corpus, tmp_path_factory):
    return deduplicated(tmp_path_factory.mktemp("crawl"), corpus)


def test_one_document_is_kept_per_brute_force_cluster(corpus, crawl):
    documents = {row["id"]: row["text"] for row in corpus}
    kept, dropped = kept_and_dropped(crawl)
    assert set(kept) | set(dropped) == set(documents)
    ids = sorted(documents)
    similar = {
        (left, right)
        for left in ids
        for right in ids
        if left < right
        and plain_similarity(documents[left], documents[right], DEDUPLICATE.ngram_size) >= DEDUPLICATE.threshold
    }
    cluster = {identity: identity for identity in ids}
    for _ in ids:
        for left, right in similar:
            cluster[left] = cluster[right] = min(cluster[left], cluster[right])
    assert sorted(row["cluster"] for row in kept.values()) == sorted(set(cluster.values()))
    for identity, row in dropped.items():
        assert cluster[identity] == cluster[row["kept_id"]] and row["kept_id"] in kept
    for identity, row in kept.items():
        members = [other for other in ids if cluster[other] == cluster[identity]]
        assert identity == min(members, key=lambda other: (-len(documents[other]), other)) and row["cluster"] == min(
            members
        )
    assert crawl.record.dropped["exact_duplicate"] == 2 and crawl.record.dropped["near_duplicate"] > 20


def odd_texts() -> list[str]:
    """Fewer words than a shingle, none, one word over and over, scripts without spaces, and a long drift of small
    steps."""
    draw = random.Random(4)
    texts = [
        "",
        "   ",
        "... ???",
        "a",
        "a b",
        *("a " * count for count in (3, 5, 50, 5000)),
        "the the the the b",
        "One, two!",
        "one two",
    ]
    for script in ("人工智能是计算机科学的一个分支它企图了解智能的实质并生产", "ปัญญาประดิษฐ์คือความฉลาดที่ถูกสร้างขึ้น"):
        texts += [script, f"{script[:20]}, {script[20:]}", script[::-1], script[3:], script[:12], f"{script[:12]}!"]
    for _ in range(60):
        words = [draw.choice("abcdefgh") for _ in range(draw.choice([1, 2, 4, 5, 6, 12, 40]))]
        changed = ["q" if index == 0 else word for index, word in enumerate(words)]
        texts += [" ".join(words), " ".join(changed), " ".join(reversed(words))]
    drift = [f"c{draw.randrange(5000)}" for _ in range(120)]
    return texts + [" ".join(drift[start : start + 40]) for start in range(80)]


def test_short_empty_repetitive_and_unspaced_texts_and_a_long_chain_are_judged_as_by_brute_force(tmp_path):
    texts = odd_texts()
    words = [re.findall(r"[\u0e00-\u0e7f\u4e00-\u9fff]|[a-z0-9]+", text.lower()) for text in texts]
    sets = [{tuple(own[start : start + 5]) for start in range(max(len(own) - 4, 1))} if own else set() for own in words]
    similar = np.array([[len(one & other) >= 0.7 * len(one | other) and bool(one) for other in sets] for one in sets])
    blank = np.array([" ".join(text.split()) for text in texts])
    left, right = np.nonzero(np.triu(similar | (blank[:, None] == blank), 1))
    roots = smallest_members(len(texts), left, right)
    documents = [given_document(text, number) for number, text in enumerate(texts)]
    kept, dropped = kept_and_dropped(
        deduplicated(tmp_path, documents, DEDUPLICATE.model_copy(update={"max_removed_share": 1.0}))
    )
    root_of = {row["id"]: roots[number] for number, row in enumerate(documents)}
    assert sorted(root_of[identity] for identity in kept) == np.unique(roots).tolist()
    assert all(root_of[identity] == root_of[row["kept_id"]] for identity, row in dropped.items())


def test_every_near_duplicate_has_a_verified_neighbour_in_evidence(corpus, crawl):
    documents = {row["id"]: row["text"] for row in corpus}
    _, dropped = kept_and_dropped(crawl)
    evidence = rows(crawl, "neighbours.parquet")
    assert [row["id"] for row in evidence] == sorted(
        identity for identity, row in dropped.items() if row["reason"] == "near_duplicate"
    )
    for row in evidence:
        assert row["kept_id"] == dropped[row["id"]]["kept_id"]
        assert row["similarity"] == row["num_shared"] / row["num_union"] >= DEDUPLICATE.threshold
        others = (other for other in documents if other != row["id"])
        best = max(plain_similarity(documents[row["id"]], documents[other], DEDUPLICATE.ngram_size) for other in others)
        assert row["similarity"] == pytest.approx(best)
        assert plain_similarity(
            documents[row["id"]], documents[row["neighbour_id"]], DEDUPLICATE.ngram_size
        ) == pytest.approx(best)


def test_the_result_is_the_same_for_any_partition_count(corpus, crawl, tmp_path):
    assert deduplicated(tmp_path, corpus, resources=in_partitions(5)).digest == crawl.digest


def test_the_best_quality_survives_then_the_longest_and_what_has_no_score_comes_last(tmp_path):
    base = prose(1, 200)
    longer = base + "and more words."
    documents = [
        given_document(base, 0, quality=0.9),
        given_document(longer, 1, quality=0.2),
        given_document(edited(base, 1, 1), 2),
        given_document(prose(2, 200), 3),
        given_document(prose(2, 200) + "and more words.", 4),
        given_document(prose(3, 200), 5, quality=0.4),
        given_document(prose(3, 200), 6, quality=0.5),
    ]
    kept, dropped = kept_and_dropped(deduplicated(tmp_path, documents))
    ids = [document_id("web.jsonl", number, 0) for number in range(7)]
    assert set(kept) == {ids[0], ids[4], ids[6]}
    assert {identity: row["reason"] for identity, row in dropped.items()} == {
        ids[1]: "near_duplicate",
        ids[2]: "near_duplicate",
        ids[3]: "near_duplicate",
        ids[5]: "exact_duplicate",
    }


def template_pages(count: int) -> list[str]:
    """Pages with 200 words in common around 10 to 100 of their own: similarities on both sides of 0.7."""
    draw = np.random.default_rng(8)
    words = [f"w{number}" for number in range(5000)]
    frame = prose(1, 200).replace(".", "").split()
    return [
        " ".join([*frame[:100], *(words[index] for index in draw.integers(0, 5000, own)), *frame[100:]])
        for own in draw.integers(10, 100, count).tolist()
    ]


def test_template_pages_are_joined_only_where_their_similarity_says_so(tmp_path):
    """Hundreds of documents share most of their keys: few of their pairs are compared, yet no two similar ones stay,
    and no cluster is larger than that of all pairs."""
    texts = template_pages(600)
    result = deduplicated(
        tmp_path,
        [given_document(text, number) for number, text in enumerate(texts)],
        recipe=DEDUPLICATE.model_copy(update={"max_removed_share": 1.0}),
    )
    kept, dropped = kept_and_dropped(result)
    left, right = np.triu_indices(len(texts), 1)
    shared, union = jaccard_counts(*shingle_sets(texts, DEDUPLICATE.ngram_size), left, right)
    similar = shared / union >= DEDUPLICATE.threshold
    roots = smallest_members(len(texts), left[similar], right[similar])
    numbers = {document_id("web.jsonl", number, 0): number for number in range(len(texts))}
    assert all(roots[numbers[identity]] == roots[numbers[row["kept_id"]]] for identity, row in dropped.items())
    survivor = np.array(
        [numbers[dropped[identity]["kept_id"] if identity in dropped else identity] for identity in numbers]
    )
    plainly = shared / union >= DEDUPLICATE.threshold + 0.1
    assert (survivor[left[plainly]] == survivor[right[plainly]]).all() and plainly.sum() > 1000
    assert len(np.unique(roots)) <= len(kept) <= 1.02 * len(np.unique(roots)) and len(dropped) > 100
    assert result.record.num_verified_pairs < similar.sum()


def test_a_source_that_is_nearly_all_duplicates_stops_the_run(tmp_path):
    page = prose(1, 200)
    documents = [given_document(edited(page, 1, seed), seed, "pages.jsonl") for seed in range(MIN_JUDGED_DOCUMENTS)]
    documents += [given_document(prose(seed + 50), seed, "prose.jsonl") for seed in range(5)]
    strict = DEDUPLICATE.model_copy(update={"max_removed_share": 0.9})
    message = (
        r"source pages.jsonl: 19 of 20 documents are duplicates, more than "
        r"deduplicate.max_removed_share.*\(near_duplicate, \w+ -> \w+\)"
    )
    with pytest.raises(ValueError, match=message):
        deduplicated(tmp_path / "strict", documents, strict)
    loose = DEDUPLICATE.model_copy(update={"max_removed_share": 0.95})
    assert deduplicated(tmp_path / "loose", documents, loose).record.num_documents == 6


def shop(num_pages: int, num_others: int) -> list:
    """Pages of one template that differ in a price and a number, among other documents of their source."""
    frame = prose(1, 120).split()
    pages = [
        " ".join([*frame[:60], f"costs {7 * number} and has number {number}", *frame[60:]])
        for number in range(num_pages)
    ]
    texts = [*pages, *(prose(50 + number) for number in range(num_others))]
    return [given_document(text, number, "shop.jsonl") for number, text in enumerate(texts)]


def test_a_template_inside_a_larger_source_is_named_and_has_a_ceiling(tmp_path):
    documents = shop(40, 160)
    loose = DEDUPLICATE.model_copy(update={"max_cluster_share": 0.195})
    result = deduplicated(tmp_path / "loose", documents, loose)
    (cluster,) = result.record.largest_clusters
    assert (cluster.collection, cluster.num_removed, cluster.num_documents) == ("shop.jsonl", 39, 200)
    _, dropped = kept_and_dropped(result)
    assert (
        dropped[cluster.removed_id]["kept_id"] == cluster.kept_id
        and prose(1, 120)[:40] in cluster.kept
        and cluster.removed
    )
    again = deduplicated(tmp_path / "again", documents, loose, resources=in_partitions(5))
    assert again.digest == result.digest
    message = r"39 of 200 documents of shop.jsonl went as near-duplicates of \w+ .*max_cluster_share \(0.19\)"
    with pytest.raises(ValueError, match=message):
        deduplicated(tmp_path / "strict", documents, DEDUPLICATE.model_copy(update={"max_cluster_share": 0.19}))


def test_small_clusters_and_equal_copies_are_no_template(tmp_path):
    equal = [given_document(prose(1), number, "shop.jsonl") for number in range(30)]
    strict = DEDUPLICATE.model_copy(update={"max_removed_share": 1.0, "max_cluster_share": 0.01})
    assert deduplicated(tmp_path / "small", shop(MIN_JUDGED_DOCUMENTS, 20), strict).record.largest_clusters == ()
    assert deduplicated(tmp_path / "equal", equal, strict).record.largest_clusters == ()


URLS = {
    "https://WWW.Example.org:443/a/b/?utm_source=x&b=2&gclid=3#part": "example.org/a/b?b=2",
    "http://user:word@example.org/a/b?b=2": "example.org/a/b?b=2",
    "HTTP://Example.org.": "example.org",
    "https://example.org/?a=1&utm_x=2&c=3": "example.org?a=1&c=3",
    "https://example.org/?utm_x=2&c=3": "example.org?c=3",
    "https://example.org:8080/A/": "example.org:8080/A",
    "https://example.org/a?utm_x=2": "example.org/a",
    "https://example.org/?sid=4": "example.org?sid=4",
    "https://example.org/a;jsessionid=8F.node1/b;v=2?x=1": "example.org/a/b;v=2?x=1",
    "https://example.org/a;JSESSIONID=8F?x=1": "example.org/a?x=1",
    "https://example.org/#!/topic/1": "example.org#!/topic/1",
    "https://example.org/app/#/topic/2/": "example.org/app#/topic/2",
    "https://example.org/app#!/": "example.org/app",
    "https://example.org/%7euser/%e4%b8%ad?q=%2f%41#top": "example.org/~user/%E4%B8%AD?q=%2FA",
    "https://example.org/~user/中?q=%2FA": "example.org/~user/%E4%B8%AD?q=%2FA",
    "https://example.org/100%/%zz": "example.org/100%/%zz",
    "http://xn--mnchen-3ya.de/a": "münchen.de/a",
    "http://MÜNCHEN.de/a": "münchen.de/a",
    "http://xn--fa-hia.de": "faß.de",
    "http://fass.de": "fass.de",
    "http://xn--99999999.de": "xn--99999999.de",
    "http://xn--ib9b.xn--mnchen-3ya.de": "xn--ib9b.münchen.de",
    "https://example.org/a?b=1&a=2": "example.org/a?b=1&a=2",
    "https://m.example.org/a": "m.example.org/a",
    "ftp://example.org/a": "",
    "": "",
}


def test_urls_of_one_page_are_spelled_alike():
    import pyarrow as pa

    assert normalised_urls(pa.array(list(URLS))).to_pylist() == list(URLS.values())


def test_one_record_per_page_stays_with_all_its_pieces(tmp_path):
    def page(offset, seed, url, **chosen):
        return given_document(prose(seed), offset, url=url, **chosen)

    documents = [
        page(0, 0, "https://example.org/page?utm_source=mail", quality=0.3),
        page(1, 1, "http://www.example.org/page/", quality=0.8),
        # A record in two pieces beside a shorter one: compared as a whole.
        page(2, 2, "https://example.org/long"),
        page(2, 3, "https://example.org/long", piece=500),
        given_document(prose(4, 130), 3, url="https://example.org/long"),
        # Documents of one repository, and a URL that one file gives to many records, are no pages.
        page(4, 5, "https://example.org/repository", domain="code"),
        page(5, 6, "https://example.org/repository", domain="code"),
        *(page(10 + number, 20 + number, "https://example.org/book") for number in range(4)),
        # What stays for a page may be a copy of something better: its own survivor is named.
        page(30, 40, "https://example.org/copy", quality=0.5),
        page(31, 41, "https://example.org/copy", quality=0.4),
        given_document(prose(40), 32, quality=0.9),
    ]
    ids = {(row["offset"], row["piece"]): row["id"] for row in documents}
    _, dropped = kept_and_dropped(deduplicated(tmp_path, documents))
    assert {identity: (row["reason"], row["kept_id"]) for identity, row in dropped.items()} == {
        ids[0, 0]: ("duplicate_url", ids[1, 0]),
        ids[3, 0]: ("duplicate_url", ids[2, 0]),
        ids[30, 0]: ("exact_duplicate", ids[32, 0]),
        ids[31, 0]: ("duplicate_url", ids[32, 0]),
    }


@pytest.fixture(scope="module")
def second_crawl():
    """Near copies and a copy of kept documents of the first crawl, new texts, and copies of these."""
    again = [edited(prose(seed, 150), 1, 500 + seed) for seed in range(100, 110)]
    new = [prose(seed, 150) for seed in range(700, 710)]
    texts = [*again, prose(110, 150), *new, edited(new[0], 1, 3), new[1]]
    return [given_document(text, number, "second.jsonl", quality=1.0) for number, text in enumerate(texts)]


def test_a_new_crawl_is_deduplicated_against_stored_signatures(corpus, crawl, second_crawl, tmp_path):
    earlier = list_earlier_documents((str(directory_of(crawl)),))
    result = deduplicated(tmp_path / "second", second_crawl, previous=earlier)
    kept, dropped = kept_and_dropped(result)
    assert len(kept) == 10 and set(kept) | set(dropped) == {row["id"] for row in second_crawl}
    first = {row["id"] for row in rows(crawl, "documents/*.parquet")}
    index = SignatureIndex.open([directory_of(crawl)], DEDUPLICATE)
    for row in second_crawl:
        neighbours = index.lookup(row["text"])
        gone = dropped.get(row["id"])
        assert bool(neighbours) == bool(gone and gone["kept_id"] in first)
        if neighbours:
            assert gone is not None
            assert (
                gone["kept_id"] == min(neighbours, key=lambda one: one.id).id
                if len(neighbours) == 1
                else gone["kept_id"] in first
            )
    recipe = DEDUPLICATE.model_copy(update={"max_removed_share": 1.0})
    both = list_earlier_documents((str(directory_of(crawl)), str(directory_of(result))))
    repeated = [given_document(row["text"], row["offset"], "third.jsonl") for row in second_crawl]
    third = deduplicated(tmp_path / "third", repeated, recipe=recipe, previous=both)
    assert third.record.num_documents == 0 and third.record.dropped.keys() == {"exact_duplicate", "near_duplicate"}
    assert rows(third, "documents/*.parquet") == rows(third, "signatures/*.parquet") == []


def test_look_ups_agree_with_the_spark_job(corpus, crawl):
    """A text finds exactly those stored documents that brute force finds among the signed ones."""
    index = SignatureIndex.open([directory_of(crawl)], DEDUPLICATE)
    stored = {row["id"]: row["text"] for row in rows(crawl, "documents/*.parquet")}
    for row in corpus[::4]:
        similar = {
            identity: value
            for identity, text in stored.items()
            if (value := plain_similarity(row["text"], text, DEDUPLICATE.ngram_size)) >= DEDUPLICATE.threshold
            and text.strip(". !\n")
        }
        assert {one.id: pytest.approx(one.similarity) for one in index.lookup(row["text"])} == similar
    assert index.lookup("...") == [] and index.lookup("nothing like it") == []


def test_a_look_up_with_more_candidates_than_are_held_at_once_reads_them_in_parts(crawl, monkeypatch):
    index = SignatureIndex.open([directory_of(crawl)], DEDUPLICATE)
    text = prose(103, 150)
    (own,) = index.lookup(text)
    stored = sorted(row["id"] for row in rows(crawl, "documents/*.parquet") if row["text"].strip(". !\n"))
    monkeypatch.setattr(SignatureIndex, "candidates", lambda self, text: stored)
    monkeypatch.setattr("tasks.data.records.documents_by_id.BATCH_ROWS", 7)
    monkeypatch.setattr("tasks.data.deduplication.minhash.MAX_OWNERS", 8)
    assert len(stored) > 8 and index.lookup(text) == [own]


def test_earlier_documents_that_cannot_be_compared_are_refused(corpus, crawl, tmp_path):
    with pytest.raises(
        ValueError, match=r"documents holds no Parquet file: name directories that deduplicate_documents wrote"
    ):
        list_earlier_documents((str(tmp_path),))
    earlier = list_earlier_documents((str(directory_of(crawl)),))
    assert earlier.digest != NONE.digest == list_earlier_documents(()).digest
    other = DEDUPLICATE.model_copy(update={"ngram_size": 3})
    with pytest.raises(ValueError, match=r"its signatures were made with .*'ngram_size': 5.*use the same values"):
        deduplicated(tmp_path / "other", corpus[:3], recipe=other, previous=earlier)
    kept = next(row for row in corpus if row["id"] in {one["id"] for one in rows(crawl, "documents/*.parquet")})
    changed = given_document("another text " + kept["text"], kept["offset"])
    with pytest.raises(
        ValueError, match=rf"document {kept['id']} \(web.jsonl\) is in deduplicate.previous with another text"
    ):
        deduplicated(tmp_path / "changed", [changed], previous=earlier)


def test_a_damaged_or_mixed_directory_of_earlier_documents_is_refused(corpus, crawl, tmp_path, monkeypatch):
    """A pair without its text was compared with another document's, and near-duplicates of lost signatures went
    unnoticed."""
    whole = directory_of(crawl)
    with pytest.raises(
        ValueError, match=r"s3://bucket/crawl is no directory: copy it to a file system that executors see"
    ):
        list_earlier_documents(("s3://bucket/crawl",))
    with pytest.raises(ValueError, match=r"deduplicate.previous names .* twice"):
        list_earlier_documents((str(whole), f"{whole}/"))
    for name in ("documents", "signatures"):
        directory = shutil.copytree(whole, tmp_path / name)
        shutil.copy(directory / name / "part-00000.parquet", directory / name / "part-00001.parquet")
        with pytest.raises(
            ValueError, match=r"part-00001.parquet is only in one of documents/ and signatures/ of .* is lost"
        ):
            list_earlier_documents((str(directory),))
    mixed = shutil.copytree(whole, tmp_path / "mixed")
    table = pq.read_table(mixed / "documents" / "part-00000.parquet")
    (lost,) = (row for row in corpus if row["id"] == table.column("id")[0].as_py())
    (mixed / "documents" / "part-00000.parquet").unlink()
    pq.write_table(table.slice(1), mixed / "documents" / "part-00000.parquet")
    again = given_document(edited(lost["text"], 1, 9), 0, "again.jsonl")
    with pytest.raises(Exception, match=rf"document {lost['id']} has a signature but no text"):
        deduplicated(tmp_path / "again", [again], previous=list_earlier_documents((str(mixed),)))
    pq.write_table(table.slice(0, 3), mixed / "documents" / "part-00000.parquet")
    with pytest.raises(ValueError, match=r"has more signatures than .* has documents"):
        deduplicated(tmp_path / "fewer", [again], previous=list_earlier_documents((str(mixed),)))
    monkeypatch.setattr("tasks.data.text.words.SINGLE_RANGES", ())
    _tables.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"if only `probe` differs, this version cuts texts"):
            list_earlier_documents((str(whole),)).check_signatures(DEDUPLICATE)
    finally:
        _tables.cache_clear()


def test_shuffled_input_rows_give_the_same_documents(corpus, crawl, tmp_path):
    again = list(corpus)
    random.Random(1).shuffle(again)
    assert deduplicated(tmp_path, again).digest == crawl.digest
