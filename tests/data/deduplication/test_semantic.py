"""What semantic deduplication takes and leaves: against brute force, on judged collections, on each side of every
bound."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow as pa
import pytest

from tasks.data.deduplication.remove_semantic_duplicates import SIMILAR, remove_semantic_duplicates
from tasks.data.deduplication.similar_pairs import decide, similar_pairs
from tasks.data.embedding.semantic_vectors import (
    ASSIGNED_COLUMNS,
    BUCKET_BITS,
    MAX_DIMENSIONS,
    PAIR_NAMES,
    assign,
    buckets_of,
    fit_centroids,
    project,
    squared_norms,
    weighted_features,
)
from tasks.data.records.documents import names_of
from tests.support.data_inputs import RECIPE, RESOURCES, SHARED_DATA, compute, in_partitions, prose, rows
from tests.support.document_tables import document_row, documents_artifact

FLAT = np.ones(1 << BUCKET_BITS, dtype=np.float32)


def shuffled(text: str, seed: int) -> str:
    """The same words in sentences of another order, with every tenth word replaced: shingles differ, words do not."""
    words = text.split()
    words[:: 10 + seed] = [f"new{seed}x{index}" for index in range(len(words[:: 10 + seed]))]
    sentences = " ".join(words).split(". ")
    return ". ".join(np.random.Generator(np.random.Philox(seed)).permutation(sentences).tolist())


def inverse_frequencies(texts):
    hashes, owners, _, _ = weighted_features(texts)
    pairs = np.unique((owners << BUCKET_BITS) | buckets_of(hashes))
    frequencies = np.bincount(pairs & ((1 << BUCKET_BITS) - 1), minlength=1 << BUCKET_BITS)
    return np.log((len(texts) + 1) / (frequencies + 1)).astype(np.float32)


def cosines(texts):
    vectors = project(texts, inverse_frequencies(texts), 256, 46, 10)
    norms = np.sqrt(squared_norms(vectors))
    return vectors.astype(np.int64) @ vectors.astype(np.int64).T / np.maximum(norms[:, None] * norms, 1)


def test_a_vector_depends_on_its_text_alone_and_dot_products_are_exact():
    texts = [prose(seed, 200) for seed in range(40)] + ["", "three short words"]
    together = project(texts, FLAT, MAX_DIMENSIONS, 46, 10)
    alone = np.concatenate([project([text], FLAT, MAX_DIMENSIONS, 46, 10) for text in texts])
    assert np.array_equal(together, alone) and not together[-2:].any()
    extreme = np.full((2, MAX_DIMENSIONS), 127, dtype=np.int8)
    assert squared_norms(extreme).tolist() == [MAX_DIMENSIONS * 127**2] * 2
    assert np.array_equal(
        (together.astype(np.float32) @ together.astype(np.float32).T), together.astype(int) @ together.astype(int).T
    )


def test_cosine_follows_that_of_the_exact_weights():
    texts = [prose(1, 300), shuffled(prose(1, 300), 1), prose(2, 300), f"{prose(1, 300)} {prose(2, 300)}"]
    hashes, owners, weights, _ = weighted_features(texts)
    exact = np.zeros((len(texts), len(np.unique(hashes))))
    exact[owners, np.searchsorted(np.unique(hashes), hashes)] = weights
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    vectors = project(texts, FLAT, 1024, 46, 10).astype(float)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.abs(vectors @ vectors.T - exact @ exact.T).max() < 0.12


def test_centroids_separate_topics_and_do_not_depend_on_blocks():
    generator = np.random.Generator(np.random.Philox(5))
    topics = generator.integers(-100, 100, (3, 64))
    vectors = np.clip(np.repeat(topics, 2000, axis=0) + generator.integers(-20, 20, (6000, 64)), -127, 127).astype(
        np.int8
    )
    centroids = fit_centroids(vectors, 3, 10, 1)
    nearest = assign(vectors, centroids)
    assert np.array_equal(
        nearest, np.concatenate([assign(vectors[start : start + 17], centroids) for start in range(0, 6000, 17)])
    )
    assert len(fit_centroids(vectors[:2], 5, 3, 1)) == 2 and len(fit_centroids(np.zeros((4, 8), np.int8), 2, 3, 1)) == 0


@pytest.mark.parametrize("batch_rows", [1, 7, 600])
@pytest.mark.parametrize("window", [3, 1000])
def test_pairs_are_those_of_brute_force_inside_the_window(batch_rows, window):
    generator = np.random.Generator(np.random.Philox(7))
    base = generator.integers(-100, 100, (60, 32))
    vectors = np.clip(base[generator.integers(0, 60, 600)] + generator.integers(-4, 5, (600, 32)), -127, 127).astype(
        np.int8
    )
    clusters, positions = generator.integers(0, 4, 600).astype(np.int32), vectors.astype(int).sum(axis=1)
    order = np.lexsort((np.arange(600), positions, clusters))
    ids = [f"{number:04d}" for number in range(600)]
    quality = generator.integers(0, 3, 600) / 3
    names = names_of(ASSIGNED_COLUMNS)
    columns = [
        ids,
        [vector.tobytes() for vector in vectors[order]],
        quality,
        np.arange(600) % 5,
        clusters[order],
        positions[order],
    ]
    table = pa.table(dict(zip(names, columns, strict=True)))
    pairs = [
        row for batch in similar_pairs(iter(table.to_batches(batch_rows)), 0.98, window) for row in batch.to_pylist()
    ]
    wide = vectors[order].astype(float)
    wide /= np.linalg.norm(wide, axis=1, keepdims=True)
    alike = (wide @ wide.T > 0.98) & (clusters[order][:, None] == clusters[order])
    wanted = {(a, b) for a, b in zip(*np.nonzero(alike), strict=True) if 0 < b - a <= window}
    assert {tuple(sorted((int(row["worse"]), int(row["better"])))) for row in pairs} == wanted and len(pairs) == len(
        wanted
    )
    for row in pairs:
        rank = [(row[f"{side}_quality"], row[f"{side}_length"], row[side]) for side in ("better", "worse")]
        assert rank[0] < rank[1]


def test_a_document_goes_only_for_one_that_stays():
    """b goes for a; c is like b alone, so c stays; d goes for c."""
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("b", "d")]
    pairs = [(0, worse, 0.0, 0, better, 0.0, 0, 0.99) for better, worse in sorted(edges, key=lambda edge: edge[::-1])]
    table = pa.Table.from_pylist([dict(zip(PAIR_NAMES, pair, strict=True)) for pair in pairs])
    for size in (1, 100):
        gone = [row for batch in decide(iter(table.to_batches(size))) for row in batch.to_pylist()]
        assert [(row["id"], row["kept_id"]) for row in gone] == [("b", "a"), ("d", "c")]


@pytest.fixture(scope="module")
def corpus():
    originals = [document_row(prose(seed, 300), seed, quality=0.5) for seed in range(30)]
    copies = [
        document_row(shuffled(prose(seed, 300), seed + 40), 100 + seed, quality=0.9 if seed % 2 else 0.1)
        for seed in range(4)
    ]
    short = [document_row("few words here", 200 + number) for number in range(3)]
    code = [document_row(prose(50, 300), 300 + number, domain="code", collection="code") for number in range(3)]
    return [*originals, *copies, *short, *code]


RECIPE_10 = RECIPE.semantic.model_copy(update={"max_cosine": 0.85, "cluster_documents": 1000})


def test_the_better_of_two_stays_and_evidence_names_it(corpus, tmp_path):
    artifact = documents_artifact(corpus, tmp_path / "documents.parquet")
    result = compute(
        remove_semantic_duplicates, tmp_path / "home", documents=artifact, recipe=RECIPE_10, resources=RESOURCES
    )
    shown = {row["id"]: row for row in rows(result, "similar.parquet")}
    expected = {}
    for seed in range(4):
        pair = (corpus[seed]["id"], corpus[30 + seed]["id"])
        expected.update([pair if seed % 2 else pair[::-1]])
    assert {identity: row["kept_id"] for identity, row in shown.items()} == expected
    assert all(0.85 < row["cosine"] < 1 for row in shown.values())
    assert result.record.dropped == {SIMILAR: 4} and result.record.num_documents == len(corpus) - 4
    again = compute(
        remove_semantic_duplicates, tmp_path / "again", documents=artifact, recipe=RECIPE_10, resources=in_partitions(5)
    )
    assert again.digest == result.digest


def test_threshold_and_ceiling_have_both_sides(corpus, tmp_path):
    artifact = documents_artifact(corpus[:34], tmp_path / "documents.parquet")
    none = RECIPE_10.model_copy(update={"max_cosine": 1.0})
    result = compute(
        remove_semantic_duplicates, tmp_path / "home", documents=artifact, recipe=none, resources=RESOURCES
    )
    assert result.record.dropped == {} and rows(result, "similar.parquet") == []
    strict = RECIPE_10.model_copy(update={"max_removed_share": 0.1})
    with pytest.raises(
        ValueError, match=r"source pages: 4 of 34 documents are nearly alike.*max_removed_share \(0.1\).*cosine 0\.\d+"
    ):
        compute(remove_semantic_duplicates, tmp_path / "strict", documents=artifact, recipe=strict, resources=RESOURCES)


def test_a_corpus_of_code_alone_passes(tmp_path):
    artifact = documents_artifact(
        [document_row(prose(1), number, domain="code") for number in range(3)], tmp_path / "documents.parquet"
    )
    result = compute(
        remove_semantic_duplicates, tmp_path / "home", documents=artifact, recipe=RECIPE_10, resources=RESOURCES
    )
    assert result.record.num_documents == 3 and result.record.num_sampled == 0


def test_judged_collections_lose_no_document_that_differs():
    if not (SHARED_DATA / "dedup").exists():
        pytest.skip("no shared data")
    packed = (SHARED_DATA / "dedup" / "plagiarised_articles.jsonl.gz").read_bytes()
    records = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    lines = (SHARED_DATA / "dedup" / "plagiarised_articles_pairs.jsonl").read_text().splitlines()
    true = {frozenset(json.loads(line).values()) for line in lines}
    alike = np.triu(cosines([record["text"] for record in records]) > RECIPE.semantic.max_cosine, 1)
    pairs = {frozenset((records[a]["id"], records[b]["id"])) for a, b in zip(*np.nonzero(alike), strict=True)}
    assert pairs == true
