"""Near-duplicate detection against brute force; components against union-find; survivors independent of order and partitions."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from infra.spark import spark_session
from tasks.data.connected_components import connected_components
from tasks.data.deduplicate_documents import MIN_JUDGED_DOCUMENTS, deduplicate_documents
from tasks.data.ingest_documents import ingest_documents
from tasks.data.list_sources import list_sources
from tasks.data.minhash import banding, candidate_pairs, jaccard_counts, shingle_sets, sign_batches, signatures
from tests.data_inputs import RECIPE, RESOURCES, compute, in_partitions, prose, rows, write_jsonl

DEDUPLICATE = RECIPE.deduplicate.model_copy(update={"num_permutations": 128})


def plain_similarity(left: str, right: str, size: int) -> float:
    """Jaccard similarity of the word n-grams, one pair at a time."""
    sets = []
    for text in (left, right):
        words = text.lower().replace(".", " ").split()
        sets.append({tuple(words[start : start + size]) for start in range(max(len(words) - size + 1, 1))})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def edited(text: str, num_changes: int, seed: int) -> str:
    """The text with some words replaced."""
    generator = random.Random(seed)
    words = text.replace(".", " ").split()
    for place in generator.sample(range(len(words)), num_changes):
        words[place] = f"edit{generator.randrange(10**6)}"
    return " ".join(words)


def near_copies() -> list[str]:
    """30 texts and copies of them with 1 to 8 changed words: similarities from 0.4 to 0.96 with 5-grams."""
    return [
        text
        for seed in range(30)
        for text in (prose(seed, 200), edited(prose(seed, 200), 1 + seed % 8, seed), edited(prose(seed, 200), 9, seed))
    ]


def test_jaccard_counts_equal_plain_sets():
    texts = near_copies()
    shingles, offsets = shingle_sets(texts, 5)
    sets = [set(shingles[offsets[number] : offsets[number + 1]].tolist()) for number in range(len(texts))]
    pairs = [(left, right) for left in range(0, 60, 7) for right in range(len(texts))]

    def pick(side: int):
        parts = [shingles[offsets[pair[side]] : offsets[pair[side] + 1]] for pair in pairs]
        return np.concatenate(parts), np.concatenate(([0], np.cumsum([len(part) for part in parts])))

    shared, union = jaccard_counts(pick(0), pick(1))
    assert shared.tolist() == [len(sets[left] & sets[right]) for left, right in pairs]
    assert union.tolist() == [len(sets[left] | sets[right]) for left, right in pairs]


def test_signatures_estimate_the_similarity_without_bias():
    texts = near_copies()
    shingles, offsets = shingle_sets(texts, 5)
    signed = signatures(shingles, offsets, 256)
    errors = [
        (signed[start] == signed[start + 1]).mean() - plain_similarity(texts[start], texts[start + 1], 5)
        for start in range(0, len(texts), 3)
    ]
    assert abs(np.mean(errors)) < 0.02 and np.abs(errors).max() < 0.15


def test_stored_signatures_answer_in_datasketch_as_the_bands_do():
    from datasketch import MinHash, MinHashLSH

    texts = near_copies()
    signed = signatures(*shingle_sets(texts, 5), 128)
    num_bands, num_rows = banding(0.7, 128)
    index = MinHashLSH(num_perm=128, params=(num_bands, num_rows))
    hashes = [MinHash(num_perm=128, hashvalues=values.astype(np.uint64), scheme="affine32") for values in signed]
    for number, value in enumerate(hashes):
        index.insert(number, value)
    blocks = signed[:, : num_bands * num_rows].reshape(len(texts), num_bands, num_rows)
    for number, value in enumerate(hashes):
        assert set(index.query(value)) == set(np.flatnonzero((blocks == blocks[number]).all(axis=2).any(axis=1)).tolist())


def test_buckets_that_span_batches_give_the_same_pairs():
    keys = np.sort(np.random.default_rng(0).integers(0, 40, 300))
    table = pa.table({"key": keys, "id": [f"{number:04d}" for number in range(300)]})
    expected = {(f"{i:04d}", f"{j:04d}") for i in range(300) for j in range(i + 1, 300) if keys[i] == keys[j]}
    for size in (1, 7, 300):
        found = [
            pair for batch in candidate_pairs(iter(table.to_batches(max_chunksize=size)))
            for pair in zip(batch["left"].to_pylist(), batch["right"].to_pylist(), strict=True)
        ]  # fmt: skip
        assert len(found) == len(set(found)) and set(found) == expected


def test_documents_without_words_have_no_bands():
    (batch,) = sign_batches(iter([pa.record_batch({"id": ["a", "b"], "text": ["...", "one word"]})]), 5, 64, 12, 5)
    assert [len(bands) for bands in batch["bands"].to_pylist()] == [0, 12]


@pytest.mark.parametrize("shape", ["chain", "random", "star", "none"])
def test_components_are_those_of_union_find(shape):
    generator = random.Random(3)
    names = [f"{number:03d}" for number in range(60)]
    generator.shuffle(names)
    edges = {
        "chain": [(names[number], names[number + 1]) for number in range(30)],
        "random": [tuple(generator.sample(names, 2)) for _ in range(40)],
        "star": [(names[0], name) for name in names[1:20]],
        "none": [],
    }[shape]
    parent = {name: name for edge in edges for name in edge}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    for left, right in edges:
        low, high = sorted((root(left), root(right)))
        parent[high] = low
    frame = spark_session(RESOURCES).createDataFrame(edges, "left string, right string")
    found = {row.id: row.root for row in connected_components(frame).collect()}
    assert found == {name: root(name) for name in parent}


@pytest.fixture(scope="module")
def ingested(tmp_path_factory):
    """Near copies, exact copies and a chain A ~ B ~ C, in one file and, reversed, in another directory."""
    root = tmp_path_factory.mktemp("dedup")
    texts = [*near_copies(), *(prose(seed, 150) for seed in range(100, 130)), prose(100, 150), prose(101, 150)]
    write_jsonl(root / "data" / "web.jsonl", [{"text": text} for text in texts])
    recipe = RECIPE.ingest.model_copy(update={"max_source_bytes": 10**9})
    return compute(ingest_documents, root / "home", sources=list_sources(root / "data"), recipe=recipe, resources=RESOURCES)


def test_deduplication_keeps_one_document_per_brute_force_cluster(ingested, tmp_path):
    documents = {row["id"]: row["text"] for row in rows(ingested, "documents/*.parquet")}
    result = compute(deduplicate_documents, tmp_path, documents=ingested, recipe=DEDUPLICATE, resources=RESOURCES)
    kept = {row["id"]: row for row in rows(result, "documents/*.parquet")}
    dropped = {row["id"]: row for row in rows(result, "dropped.parquet")}
    assert set(kept) | set(dropped) == set(documents) and not set(kept) & set(dropped)
    ids = sorted(documents)
    neighbours = {
        (left, right) for left in ids for right in ids
        if left < right and plain_similarity(documents[left], documents[right], DEDUPLICATE.ngram_size) >= DEDUPLICATE.threshold
    }  # fmt: skip
    cluster = {identity: identity for identity in ids}
    for _ in ids:
        for left, right in neighbours:
            cluster[left] = cluster[right] = min(cluster[left], cluster[right])
    assert sorted(row["cluster"] for row in kept.values()) == sorted(set(cluster.values()))
    for identity, row in dropped.items():
        assert cluster[identity] == cluster[row["kept_id"]] and row["kept_id"] in kept
    for identity, row in kept.items():
        members = [other for other in ids if cluster[other] == cluster[identity]]
        assert identity == min(members, key=lambda other: (-len(documents[other]), other)) and row["cluster"] == min(members)
    assert result.record.dropped["exact_duplicate"] == 2 and result.record.dropped["near_duplicate"] > 20


def test_deduplication_is_the_same_for_any_partition_count_and_input_order(ingested, tmp_path):
    digests = {
        compute(deduplicate_documents, tmp_path / str(count), documents=ingested, recipe=DEDUPLICATE, resources=in_partitions(count)).digest
        for count in (1, 5)
    }
    assert len(digests) == 1


def test_a_source_that_is_nearly_all_duplicates_stops_the_run(tmp_path):
    page = prose(1, 200)
    write_jsonl(tmp_path / "data" / "pages.jsonl", [{"text": edited(page, 1, seed)} for seed in range(MIN_JUDGED_DOCUMENTS)])
    write_jsonl(tmp_path / "data" / "more" / "prose.jsonl", [{"text": prose(seed)} for seed in range(5)])
    source = compute(
        ingest_documents, tmp_path / "home", sources=list_sources(tmp_path / "data"), recipe=RECIPE.ingest, resources=RESOURCES
    )
    recipe = DEDUPLICATE.model_copy(update={"max_removed_share": 0.9})
    with pytest.raises(ValueError, match=r"source \*: 19 of 20 documents are duplicates, more than deduplicate.max_removed_share \(0.9\)"):
        compute(deduplicate_documents, tmp_path / "strict", documents=source, recipe=recipe, resources=RESOURCES)
    allowed = recipe.model_copy(update={"max_removed_share": 0.95})
    assert (
        compute(deduplicate_documents, tmp_path / "loose", documents=source, recipe=allowed, resources=RESOURCES).record.num_documents == 6
    )
