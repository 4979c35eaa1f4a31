"""Near-duplicate detection against brute force; components against union-find; survivors independent of order and
partitions."""

from __future__ import annotations

import random
import unicodedata

import numpy as np
import pyarrow as pa
import pytest

from infra.machine.spark import spark_session
from tasks.data.deduplication.connected_components import connected_components
from tasks.data.deduplication.duplicate_candidates import BUCKET_WINDOW, EDGES, bucket_pairs
from tasks.data.deduplication.earlier_documents import EarlierDocuments
from tasks.data.deduplication.edge_components import smallest_members
from tasks.data.deduplication.minhash import (
    band_keys,
    banding,
    jaccard_counts,
    permutations,
    shingle_sets,
    shingles_of,
    signatures,
    sketches,
)
from tasks.data.records.parcels import PARCEL_BYTES, PARCEL_COLUMNS, id_numbers, id_range, id_strings, parcels, unpacked
from tasks.data.records.parquet_parts import bucket_of
from tasks.data.text.words import ngram_hashes, split_words
from tests.support.data_inputs import RECIPE, RESOURCES, prose
from tests.support.toy_steps import local_output

DEDUPLICATE = RECIPE.deduplicate.model_copy(update={"num_permutations": 128})
NONE = EarlierDocuments([], [])


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
    for index in generator.sample(range(len(words)), num_changes):
        words[index] = f"edit{generator.randrange(10**6)}"
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
    left, right = (side.ravel() for side in np.meshgrid(np.arange(0, 60, 7), np.arange(len(texts))))
    shared, union = jaccard_counts(shingles, offsets, left, right)
    pairs = list(zip(left.tolist(), right.tolist(), strict=True))
    assert shared.tolist() == [len(sets[low] & sets[high]) for low, high in pairs]
    assert union.tolist() == [len(sets[low] | sets[high]) for low, high in pairs]


@pytest.mark.parametrize("num_permutations", [1, 64, 100])
def test_signatures_are_those_of_datasketch(num_permutations):
    from datasketch import MinHash

    texts = [*near_copies()[:20], "", "...", "one", "two words", prose(7, 3000)]
    shingles, offsets = shingles_of(texts, 5)
    expected = []
    for number in range(len(texts)):
        sketch = MinHash(num_perm=num_permutations, hashfunc=lambda value: value, scheme="affine32", seed=1)
        sketch.update_batch([value >> 16 for value in shingles[offsets[number] : offsets[number + 1]].tolist()])
        expected.append(sketch.hashvalues)
    assert (signatures(shingles, offsets, permutations(num_permutations)) == np.array(expected)).all()


@pytest.mark.parametrize("size", [1, 5])
def test_shingles_are_the_hashes_of_the_word_ngrams(size):
    texts = [*near_copies()[:9], "", "...", "one", "one two three four", "a b c d e", "a b c d e f", "人工智能是"]
    shingles, offsets = shingles_of(texts, size)
    hashes, owners = ngram_hashes(split_words(texts), size, whole_if_shorter=True)
    for number in range(len(texts)):
        own = shingles[offsets[number] : offsets[number + 1]].tolist()
        assert own == (hashes[owners == number] >> np.uint64(16)).tolist()


def test_composed_and_decomposed_characters_make_the_same_shingles():
    composed = "Người dân ở đây sống bằng nghề nông, 한국의 역사는 길다 and an été"
    sets = [shingles_of([unicodedata.normalize(form, composed)], 3)[0].tolist() for form in ("NFC", "NFD")]
    assert sets[0] == sets[1]


def test_signatures_estimate_the_similarity_without_bias():
    texts = near_copies()
    signed = signatures(*shingles_of(texts, 5), permutations(256))
    errors = [
        (signed[start] == signed[start + 1]).mean() - plain_similarity(texts[start], texts[start + 1], 5)
        for start in range(0, len(texts), 3)
    ]
    assert abs(np.mean(errors)) < 0.02 and np.abs(errors).max() < 0.15


def test_ids_are_numbers_and_back_and_lie_in_the_ranges_of_their_files():
    ids = ["0000000000000000", "00000000000000ff", "7fffffffffffffff", "8000000000000000", "ffffffffffffffff"]
    numbers = id_numbers(pa.array(ids))
    assert numbers.tolist() == [int(identity, 16) for identity in ids]
    assert id_numbers(pa.array(ids)[2:4]).tolist() == numbers[2:4].tolist()
    assert id_strings(numbers).to_pylist() == ids
    assert id_range(numbers, 7).tolist() == [bucket_of(identity, 7) for identity in ids]


def every_pair(keys, ids, is_new):
    return {
        (min(ids[i], ids[j]), max(ids[i], ids[j]))
        for i in range(len(keys))
        for j in range(i + 1, len(keys))
        if keys[i] == keys[j] and ids[i] != ids[j] and (is_new[i] or is_new[j])
    }


def test_small_buckets_are_paired_completely_and_no_pair_is_of_two_earlier_documents():
    draw = np.random.default_rng(0)
    keys = draw.integers(0, 40, 300).astype(np.uint64)
    ids = draw.integers(0, 250, 300).astype(np.uint64)
    for is_new in (np.ones(300, bool), draw.random(300) < 0.5):
        left, right = bucket_pairs(keys, ids, ids, is_new)
        pairs = list(zip(left.tolist(), right.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs) and set(pairs) == every_pair(keys.tolist(), ids.tolist(), is_new)


def test_a_large_bucket_is_one_component_of_few_pairs():
    """Buckets of up to BUCKET_WINDOW + 1 documents are complete; of more each document meets a bounded number, and none
    is cut off."""
    for size in (BUCKET_WINDOW + 1, BUCKET_WINDOW + 2, 5000):
        ids = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        left, right = bucket_pairs(np.full(size, 5, np.uint64), ids, ids, np.ones(size, bool))
        complete = size * (size - 1) // 2
        assert len(left) == complete if size == BUCKET_WINDOW + 1 else len(left) <= min(complete, 16 * size)
        _, indices = np.unique(np.concatenate((left, right)), return_inverse=True)
        assert set(smallest_members(size, *indices.reshape(2, -1)).tolist()) == {0}


@pytest.mark.parametrize("is_new_crawl", [False, True])
def test_an_original_meets_its_copies_where_they_are_unlike_each_other(is_new_crawl):
    """3,000 copies of similarity 0.82 to their original and 0.68 to one another fill large buckets: nearly every one is
    compared with the original, without more pairs; also where copies and original are of two crawls."""
    draw, count = np.random.default_rng(6), 3000
    values = draw.integers(0, 1 << 32, (count + 1, 128), dtype=np.uint32)
    values[1:] = np.where(draw.random((count, 128)) < 0.82, values[0], values[1:])
    num_bands, num_rows = banding(0.7, 128)
    ids = draw.permutation(count + 1).astype(np.uint64)
    is_new = np.arange(count + 1) > 0 if is_new_crawl else np.ones(count + 1, bool)
    columns = (np.repeat(column, num_bands) for column in (ids, sketches(values), is_new))
    left, right = bucket_pairs(band_keys(values, num_bands, num_rows).reshape(-1), *columns)
    assert ((left == ids[0]) | (right == ids[0])).sum() >= 0.98 * count and len(left) <= 16 * 21 * count


def test_bands_catch_what_the_threshold_promises_and_too_few_permutations_are_named():
    for threshold, count in ((0.5, 128), (0.7, 64), (0.7, 128), (0.8, 128), (0.9, 128)):
        num_bands, num_rows = banding(threshold, count)
        missed = (1 - min(threshold + 0.1, 1) ** num_rows) ** num_bands
        assert num_bands * num_rows <= count and missed < 0.01
    for threshold, count in ((0.7, 1), (0.99, 16)):
        with pytest.raises(
            ValueError, match=rf"deduplicate.num_permutations \({count}\) are too few for deduplicate.threshold"
        ):
            banding(threshold, count)


def test_sketches_are_as_alike_as_signatures():
    texts = near_copies()
    for count in (32, 64, 256):
        signed = signatures(*shingles_of(texts, 5), permutations(count))
        sketched = sketches(signed)
        same = 64 - np.bitwise_count(sketched[:-1] ^ sketched[1:])
        last = signed[:, -64:] & 1
        assert (same == (last[:-1] == last[1:]).sum(axis=1) + max(64 - count, 0)).all()


def shapes_of_graphs() -> dict[str, list[tuple[int, int]]]:
    generator = random.Random(3)
    names = list(range(60))
    generator.shuffle(names)
    return {
        "chain": [(names[number], names[number + 1]) for number in range(30)],
        "random": [(one, other) for one, other in (generator.sample(names, 2) for _ in range(40))],
        "star": [(names[0], name) for name in names[1:20]],
        "combs": [(number, number + 1) for number in range(0, 40, 2)]
        + [(number, number + 4) for number in range(1, 30, 4)],
        "none": [],
    }


def union_find(edges) -> dict[int, int]:
    parent = {name: name for edge in edges for name in edge}

    def root(name: int) -> int:
        while parent[name] != name:
            name = parent[name]
        return name

    for left, right in edges:
        low, high = sorted((root(left), root(right)))
        parent[high] = low
    return {name: root(name) for name in parent}


def test_parcels_are_bounded_and_lose_no_row():
    offsets = np.cumsum([0, *range(15_000, 21_000, 100)])
    values = np.random.default_rng(0).integers(0, 2**63, offsets[-1], dtype=np.int64)
    table = pa.table(
        {"id": np.arange(60), "shingles": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))}
    )
    sent = list(parcels(EDGES, 7, table))
    payloads = pa.Table.from_batches(sent)
    assert len(sent) > 1 and max(map(len, payloads["payload"].to_pylist())) < 1.2 * PARCEL_BYTES
    assert payloads["target"].to_pylist() == [7] * len(sent) and sum(payloads["num_rows"].to_pylist()) == 60
    assert unpacked(iter(sent))[EDGES].equals(table.combine_chunks())
    assert not list(parcels(EDGES, 7, table.slice(0, 0)))


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=[pytest.mark.long] * (shape in ("chain", "combs"))) for shape in shapes_of_graphs()],
)
@pytest.mark.parametrize("way", ["one task", "stars"])
def test_components_are_those_of_union_find(shape, way, tmp_path):
    edges = shapes_of_graphs()[shape]
    ends = np.array(edges, dtype=np.uint64).reshape(-1, 2)
    halves = [part for part in (ends[::2], ends[1::2]) if len(part)]
    sent = [
        batch
        for part in halves
        for batch in parcels(EDGES, 0, pa.table({"left": part.min(axis=1), "right": part.max(axis=1)}))
    ]
    spark = spark_session(RESOURCES)
    frame = spark.createDataFrame(pa.Table.from_batches(sent)) if sent else spark.createDataFrame([], PARCEL_COLUMNS)
    components = connected_components(
        frame, len(edges), local_output(tmp_path), "rounds", RESOURCES, len(edges) if way == "one task" else -1
    ).collect()
    assert {int(row.id, 16): int(row.root, 16) for row in components} == union_find(edges) and len(components) == len(
        union_find(edges)
    )


def test_components_in_memory_are_those_of_a_union_find():
    draw = np.random.default_rng(5)
    for count in (1, 2, 3, 1000):
        line = np.arange(count - 1)
        for left, right in (
            (line, line + 1),
            (draw.permutation(count)[:-1], draw.permutation(count)[1:]),
            (line[:0], line[:0]),
        ):
            expected = union_find(list(zip(left.tolist(), right.tolist(), strict=True)))
            assert smallest_members(count, left, right).tolist() == [expected.get(node, node) for node in range(count)]
