"""Shards as Megatron reads them; packed rows as a function of (seed, position), exact in tokens per domain."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from configs.schema import PackingRecipe
from tasks.data.pack_phase import _domain_order, allot_tokens
from tasks.data.packed_rows import PackedRows
from tasks.data.row_order import shuffled_rows
from tasks.data.token_shard import append_tokens, open_shard, token_dtype, write_index

SEQUENCES = {"code-00000": [[1, 2, 3, 9], [4, 5, 9], [6, 9]], "web-00000": [[11, 12, 9], [13, 14, 15, 16, 17, 9]]}


@pytest.fixture
def shards_dir(tmp_path):
    for name, sequences in SEQUENCES.items():
        with open(tmp_path / f"{name}.bin", "wb") as file:
            lengths = append_tokens(file, sequences, token_dtype(1024))
        write_index(tmp_path / f"{name}.idx", lengths, token_dtype(1024))
    return tmp_path


def test_megatron_core_reads_our_shards(shards_dir):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for name, sequences in SEQUENCES.items():
        dataset = IndexedDataset(str(shards_dir / name))
        assert [dataset[number].tolist() for number in range(len(dataset))] == sequences
        assert dataset.document_indices.tolist() == list(range(len(sequences) + 1))


@pytest.mark.parametrize("vocab_size", [1024, 151_552])
def test_a_large_vocabulary_takes_32_bits_as_in_megatron(vocab_size):
    from megatron.core.datasets.indexed_dataset import DType

    assert token_dtype(vocab_size) == np.dtype(DType.optimal_dtype(vocab_size))


@pytest.mark.parametrize(("file", "damage"), [("code-00000.idx", b"MMIDIDX"), ("code-00000.bin", b"\x01")])
def test_a_damaged_shard_is_named(shards_dir, file, damage):
    (shards_dir / file).write_bytes(damage)
    with pytest.raises(ValueError, match=rf"{file}.*shard the documents again"):
        open_shard(shards_dir / "code-00000.bin")


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 64, 1000])
def test_shuffled_rows_are_a_permutation_that_depends_on_the_seed(num_rows):
    rows = np.arange(num_rows)
    assert sorted(shuffled_rows(rows, num_rows, 46)) == list(rows)
    if num_rows >= 64:
        assert not np.array_equal(shuffled_rows(rows, num_rows, 46), shuffled_rows(rows, num_rows, 47))
        assert np.array_equal(shuffled_rows(rows[5:9], num_rows, 46), shuffled_rows(rows, num_rows, 46)[5:9])


@pytest.fixture
def packed(shards_dir):
    """One pass over both shards in rows of 3 tokens, written as pack_phase does."""
    stream = [(0, n, len(s)) for n, s in enumerate(SEQUENCES["code-00000"])] + [
        (1, n, len(s)) for n, s in enumerate(SEQUENCES["web-00000"])
    ]
    lengths = np.array([length for *_, length in stream])
    order = np.column_stack(
        [[s for s, *_ in stream], [n for _, n, _ in stream], np.zeros(len(stream), int), lengths, np.cumsum(lengths) - lengths]
    )
    np.save(shards_dir / "order.npy", order.astype(np.int64))
    (shards_dir / "packing.json").write_text(json.dumps({"sequence_length": 3, "seed": 46, "shards": list(SEQUENCES)}))
    return PackedRows(shards_dir, shards_dir)


def test_packed_rows_are_the_stream_cut_and_shuffled(packed):
    stream = [token for sequences in SEQUENCES.values() for sequence in sequences for token in sequence]
    assert len(packed) == (len(stream) - 1) // 3
    tokens, segments = packed.rows(0, len(packed))
    assert sorted(map(tuple, tokens)) == sorted(tuple(stream[row * 3 : row * 3 + 4]) for row in range(len(packed)))
    owners = [number for number, sequence in enumerate([*SEQUENCES["code-00000"], *SEQUENCES["web-00000"]]) for _ in sequence]
    assert sorted(map(tuple, segments)) == sorted(tuple(owners[row * 3 : row * 3 + 4]) for row in range(len(packed)))


def test_any_range_of_rows_equals_that_part_of_all_rows(packed):
    tokens, segments = packed.rows(0, len(packed))
    for start in range(len(packed)):
        part = packed.rows(start, start + 1)
        assert np.array_equal(part[0], tokens[start : start + 1])
        assert np.array_equal(part[1], segments[start : start + 1])
    with pytest.raises(ValueError, match="asks for more tokens than were packed"):
        packed.rows(0, len(packed) + 1)


def recipe(**changes):
    given = {"num_tokens": 1000, "sequence_length": 10, "mixture": {"web": 0.5, "code": 0.3, "math": 0.2}, "max_epochs": 2.0, "seed": 1}
    return PackingRecipe(**{**given, **changes})


def test_tokens_per_domain_are_exact_and_absent_domains_leave_their_share_to_the_others():
    assert allot_tokens(recipe(), {"web": 10**6, "code": 10**6, "math": 0}) == {"code": 375, "web": 626}
    assert sum(allot_tokens(recipe(), {"web": 10**6, "code": 10**6, "math": 10**6}).values()) == 1001


def test_too_many_epochs_and_no_text_are_refused_with_the_budget_that_fits():
    with pytest.raises(ValueError, match=r"code has 100 tokens, 375 are asked for; lower num_tokens to at most 530"):
        allot_tokens(recipe(), {"web": 10**6, "code": 100, "math": 0})
    assert allot_tokens(recipe(num_tokens=530), {"web": 10**6, "code": 100, "math": 0})
    with pytest.raises(ValueError, match="none of the mixture's domains"):
        allot_tokens(recipe(), {"web": 0, "code": 0, "math": 0})


def test_every_document_of_a_domain_is_read_once_per_epoch_and_the_budget_is_met():
    lengths = {"code-00000": np.array([4, 3, 2]), "code-00001": np.array([5])}
    order = _domain_order("code", list(lengths), list(lengths), lengths, 14 * 2 + 3, seed=7)
    assert order[:, 3].sum() == 31
    visits = Counter((int(shard), int(sequence)) for shard, sequence in order[:8, :2])
    assert set(visits.values()) == {2}
    again = _domain_order("code", list(lengths), list(lengths), lengths, 14 * 2 + 3, seed=7)
    assert np.array_equal(order, again)
