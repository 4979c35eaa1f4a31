"""Shards as Megatron reads them; packed rows as a function of (seed, position), exact in tokens per domain."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import PackingRecipe
from infra.step import Output, Record, step
from tasks.data.packing.best_fit import num_rows, place_pieces, row_shapes
from tasks.data.packing.fill_in_middle import FIM_TOKENS
from tasks.data.packing.mixture_schedule import allot_tokens, slots_of
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.packing.packed_order import write_part
from tasks.data.packing.row_order import shuffled_rows
from tasks.data.shards.token_shard import append_tokens, open_shard, token_dtype, write_index
from tasks.data.shards.tokenize_parts import write_sequences
from tests.support.data_inputs import compute
from tests.support.training_inputs import packed_lines, packed_rows

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


def _with_bytes(path, offset: int, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (9, b"\x02"),
        (17, b"\x09"),
        (18, b"\x04"),
        (34, b"\xff\xff\xff\xff"),
        (34, b"\x03\0\0\0\x04\0\0\0"),
        (46, b"\x02"),
    ],
    ids=["version", "dtype", "count", "negative length", "exchanged lengths", "pointer"],
)
def test_an_index_whose_numbers_do_not_fit_together_is_named(shards_dir, offset, value):
    _with_bytes(shards_dir / "code-00000.idx", offset, value)
    with pytest.raises(ValueError, match=r"code-00000\.idx.*shard the documents again"):
        open_shard(shards_dir / "code-00000.bin")


def test_missing_tokens_a_cut_mask_and_a_cut_order_are_named(shards_dir, packed):
    (shards_dir / "code-00000.mask").write_bytes(b"\1" * 8)
    with pytest.raises(ValueError, match=r"code-00000\.mask has 8 bytes for 9 tokens: shard the conversations again"):
        packed_rows(shards_dir, shards_dir).rows(0, 3)
    (shards_dir / "code-00000.mask").unlink()
    whole = (shards_dir / "order-00000.npy").read_bytes()
    for size in (0, 5, 100, len(whole) - 8):
        (shards_dir / "order-00000.npy").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"order-00000\.npy is missing, cut short or damaged"):
            packed_rows(shards_dir, shards_dir)
    (shards_dir / "web-00000.bin").unlink()
    for opening in (lambda: open_shard(shards_dir / "web-00000.bin"), lambda: packed_rows(shards_dir, shards_dir)):
        with pytest.raises(ValueError, match=r"web-00000\.bin is missing beside its index"):
            opening()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32), (151_552, np.int32)])
def test_megatron_core_reads_what_the_shard_step_writes(tmp_path, vocab_size, dtype):
    """Both dtypes, empty sequences and several batches, through the writer that executors run."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    draw = np.random.default_rng(vocab_size)
    lengths = [draw.integers(0, 40, size) for size in (7, 1, 12)]
    parts = [draw.integers(0, vocab_size, own.sum()) for own in lengths]
    encoded = iter([(part, own, None) for part, own in zip(parts, lengths, strict=True)])
    row = {"shard": "web-00000", "id": "a", "source": "s", "offset": 0, "piece": 0, "quality_bucket": 0}
    batches = iter([pa.RecordBatch.from_pylist([row] * len(own)) for own in lengths])
    rows = list(write_sequences(batches, str(tmp_path), token_dtype(vocab_size), lambda batch: next(encoded)))
    dataset, whole = IndexedDataset(str(tmp_path / "web-00000")), np.concatenate(parts)
    assert dataset.index.dtype is dtype and not dataset.index.sequence_modes
    assert dataset.sequence_lengths.tolist() == np.concatenate(lengths).tolist()
    assert np.array_equal(np.concatenate([dataset[number] for number in range(len(dataset))]), whole)
    assert (
        dataset.document_indices.tolist() == list(range(21))
        and sum(len(batch) - batch["sequence"].null_count for batch in rows) == 20
    )
    opened = open_shard(tmp_path / "web-00000.bin")
    assert np.array_equal(opened.tokens, whole) and opened.tokens.dtype == dtype


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
        [
            [s for s, *_ in stream],
            [n for _, n, _ in stream],
            np.zeros(len(stream), int),
            lengths,
            np.cumsum(lengths) - lengths,
            np.arange(len(stream)),
        ]
    )
    part = write_part(shards_dir / "order-00000.npy", order.astype(np.int64))
    (shards_dir / "packing.json").write_text(
        json.dumps(
            {
                "packing": "stream",
                "sequence_length": 3,
                "seed": 46,
                "has_glue": False,
                "shards": list(SEQUENCES),
                "parts": [part],
            }
        )
    )
    return packed_rows(shards_dir, shards_dir)


def test_packed_rows_are_the_stream_cut_and_shuffled(packed):
    stream = [token for sequences in SEQUENCES.values() for sequence in sequences for token in sequence]
    assert len(packed) == (len(stream) - 1) // 3
    tokens, segments, trained = packed.rows(0, len(packed))
    assert trained.all() and not packed.is_segmented
    assert sorted(map(tuple, tokens)) == sorted(tuple(stream[row * 3 : row * 3 + 4]) for row in range(len(packed)))
    owners = [
        number for number, sequence in enumerate([*SEQUENCES["code-00000"], *SEQUENCES["web-00000"]]) for _ in sequence
    ]
    assert sorted(map(tuple, segments)) == sorted(tuple(owners[row * 3 : row * 3 + 4]) for row in range(len(packed)))


def test_any_range_of_rows_equals_that_part_of_all_rows(packed):
    tokens, segments, _ = packed.rows(0, len(packed))
    for start in range(len(packed)):
        part = packed.rows(start, start + 1)
        assert np.array_equal(part[0], tokens[start : start + 1])
        assert np.array_equal(part[1], segments[start : start + 1])
    with pytest.raises(ValueError, match="asks for more tokens than were packed"):
        packed.rows(0, len(packed) + 1)


def recipe(**changes):
    given = {
        "num_tokens": 1000,
        "sequence_length": 10,
        "mixture": {"web": 0.5, "code": 0.3, "math": 0.2},
        "max_epochs": 2.0,
        "seed": 1,
        "fim_rate": 0.0,
        "packing": "stream",
        "bucket_weights": (),
    }
    return PackingRecipe(**{**given, **changes})


def test_tokens_per_domain_are_exact_and_absent_domains_leave_their_share_to_the_others():
    assert allot_tokens(recipe(), {"web": 10**6, "code": 10**6, "math": 0}, 1001) == {"code": 375, "web": 626}
    assert sum(allot_tokens(recipe(), {"web": 10**6, "code": 10**6, "math": 10**6}, 1001).values()) == 1001


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_the_budget_that_is_said_to_fit_fits_and_one_row_more_does_not(packing):
    draw = np.random.default_rng(5)
    for case in range(60):
        mixture = dict(zip(("web", "code", "math"), draw.uniform(0.01, 1.0, 3).round(3).tolist(), strict=True))
        available = dict(zip(mixture, draw.integers(1, 4000, 3).tolist(), strict=True))
        given = recipe(
            mixture=mixture, packing=packing, max_epochs=float(draw.choice([0.5, 1.0, 2.5])), num_tokens=10**6
        )
        with pytest.raises(ValueError, match="the mixture needs more than max_epochs") as refused:
            allot_tokens(given, available, slots_of(given, 10**5))
        stated = re.search(r"lower num_tokens to at most ([\d,]+)", str(refused.value))
        num_rows = int(stated.group(1).replace(",", "")) // given.sequence_length if stated else 0
        assert (stated is not None) == bool(num_rows), case
        if num_rows:
            assert sum(allot_tokens(given, available, slots_of(given, num_rows)).values()) == slots_of(given, num_rows)
        with pytest.raises(ValueError, match="the mixture needs more than max_epochs"):
            allot_tokens(given, available, slots_of(given, num_rows + 1))


@pytest.mark.parametrize(
    "mixture",
    [
        {"web": 1.0, "code": -0.2},
        {"web": float("nan")},
        {"web": float("inf")},
        {"web": 0.0},
        {"web": 0.0, "code": 0},
        ({"at_share": 0.0, "mixture": {"web": 1.0}}, {"at_share": 1.0, "mixture": {"web": 0.0}}),
    ],
)
def test_weights_that_give_no_share_are_refused_where_they_are_written(mixture):
    with pytest.raises(ValueError, match=r"mixture|greater than or equal to 0|finite"):
        recipe(mixture=mixture)


def test_weights_count_by_their_ratio_and_a_weight_of_zero_asks_for_no_text():
    held = {"web": 10**6, "code": 10**6}
    assert allot_tokens(recipe(mixture={"web": 6.0, "code": 2.0, "math": 0.0}), held, 1001) == {"code": 250, "web": 751}


def test_too_many_epochs_and_no_text_are_refused_with_the_budget_that_fits():
    with pytest.raises(ValueError, match=r"code has 100 tokens, 375 are asked for; lower num_tokens to at most 530"):
        allot_tokens(recipe(), {"web": 10**6, "code": 100, "math": 0}, 1001)
    assert allot_tokens(recipe(num_tokens=530), {"web": 10**6, "code": 100, "math": 0}, 531)
    with pytest.raises(ValueError, match="none of the mixture's domains"):
        allot_tokens(recipe(), {"web": 0, "code": 0, "math": 0}, 1001)


CAPACITY = 33


def lengths_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, CAPACITY + 1, count)


def naive_best_fit(lengths: np.ndarray) -> list[list[int]]:
    """Longest first, each into the row with the least room that holds it."""
    rows: list[list[int]] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [row for row in rows if sum(row) + length <= CAPACITY]
        if not fitting:
            rows.append([])
        max(fitting, key=sum, default=rows[-1]).append(length)
    return rows


def next_fit(lengths: np.ndarray) -> int:
    num_rows, room = 0, 0
    for length in lengths.tolist():
        num_rows, room = (num_rows, room - length) if length <= room else (num_rows + 1, CAPACITY - length)
    return num_rows


@pytest.mark.parametrize(("seed", "count"), [(1, 1), (2, 7), (3, 500), (4, 2000)])
def test_best_fit_over_the_histogram_equals_the_naive_one_and_needs_fewer_rows_than_next_fit(seed, count):
    lengths = lengths_of(seed, count)
    shapes = row_shapes(lengths, CAPACITY)
    naive = naive_best_fit(lengths)
    assert sorted(map(sum, naive)) == sorted(sum(shape.lengths) for shape in shapes for _ in range(shape.count))
    assert num_rows(shapes) == len(naive) <= next_fit(lengths)
    if count >= 500:
        assert num_rows(shapes) < 0.9 * next_fit(lengths)
    fills = [sum(shape.lengths) for shape in shapes]
    assert fills == sorted(fills, reverse=True)


def test_every_piece_gets_slots_of_its_own_inside_one_row():
    lengths = lengths_of(5, 300)
    piece, slot = place_pieces(lengths, row_shapes(lengths, CAPACITY), CAPACITY)
    assert sorted(piece) == list(range(300)) and (np.diff(slot) > 0).all() and slot[0] == 0
    assert (slot // CAPACITY == (slot + lengths[piece] - 1) // CAPACITY).all()
    assert (slot[:-1] + lengths[piece][:-1] <= slot[1:]).all()


class ToyShards(Record):
    shards: tuple[str, ...]
    domains: dict[str, str]


@step(content=("shards/*",))
def write_documents(*, output: Output) -> ToyShards:
    """Two domains; a third of the web documents is longer than a row of 32."""
    for name, seed, longest in (("code-00000", 1, 20), ("web-00000", 2, 90)):
        draw = np.random.default_rng(seed)
        write_shard(output, name, [draw.integers(1, 900, draw.integers(2, longest)).tolist() for _ in range(400)])
    return ToyShards(shards=("code-00000", "web-00000"), domains={"code-00000": "code", "web-00000": "web"})


@step(content=("shards/*",))
def write_chats(*, output: Output) -> ToyShards:
    """Conversations of which the second half of the tokens is trained; some are longer than a row."""
    draw = np.random.default_rng(3)
    sequences = [draw.integers(1, 900, draw.integers(4, 40)).tolist() for _ in range(300)]
    write_shard(output, "chat-00000", sequences)
    output.path("shards/chat-00000.mask").write_bytes(
        b"".join(bytes(n >= len(s) // 2 for n in range(len(s))) for s in sequences)
    )
    return ToyShards(shards=("chat-00000",), domains={"chat-00000": "chat"})


def write_shard(output: Output, name: str, sequences: list[list[int]]) -> None:
    with open(output.path(f"shards/{name}.bin"), "wb") as file:
        lengths = append_tokens(file, sequences, token_dtype(1024))
    write_index(output.path(f"shards/{name}.idx"), lengths, token_dtype(1024))


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    root = tmp_path_factory.mktemp("packing")
    return root, compute(write_documents, root), compute(write_chats, root)


def pack(toys, **changes):
    """(record, order, rows, lengths per shard) of the toy shards, packed."""
    root, documents, chats = toys
    mixture = {"chat": 0.5, "web": 0.3, "code": 0.2}
    given = recipe(**{"num_tokens": 3200, "sequence_length": 32, "mixture": mixture, "packing": "best_fit", **changes})
    packed = compute(pack_phase, root, shards=documents, chats=chats, recipe=given)
    rows = packed_rows(packed, documents, chats)
    return packed.record, packed_lines(packed), rows, [documents, documents, chats]


def test_best_fit_fills_exactly_the_rows_of_the_phase_and_cuts_no_conversation(toys):
    record, order, rows, sources = pack(toys)
    assert record.num_rows == len(rows) == 100 and record.fill_share > 0.97
    shards = [
        open_shard(source.directory("shards") / f"{name}.bin")
        for source, name in zip(sources, ("code-00000", "web-00000", "chat-00000"), strict=True)
    ]
    for shard, sequence, offset, length, slot, _ in order.tolist():
        whole = shards[shard].lengths[sequence]
        assert slot // 33 == (slot + length - 1) // 33
        if shard == 2:
            assert (offset, length) == (0, whole)
        else:
            assert offset % 33 == 0 and length == min(whole - offset, 33)
    assert record.num_too_long == np.count_nonzero(shards[2].lengths > 33) > 0
    assert not set(order[order[:, 0] == 2, 1]) & set(np.flatnonzero(shards[2].lengths > 33))
    share = record.tokens_by_domain["chat"] / record.num_tokens
    assert abs(share - 0.5) < 0.02 and sum(record.tokens_by_domain.values()) == order[:, 3].sum()


def test_rows_that_hold_none_of_the_conversations_are_refused(toys):
    with pytest.raises(ValueError, match="all 300 conversations are longer than a row of 2 tokens: raise"):
        pack(toys, sequence_length=2)


def test_best_fit_reads_every_conversation_once_per_epoch_but_for_the_last_rows(toys):
    record, order, _, sources = pack(toys)
    read = Counter(order[order[:, 0] == 2, 1].tolist())
    assert set(read.values()) == {1}
    record, order, _, sources = pack(toys, num_tokens=32 * 560, mixture={"chat": 1.0}, max_epochs=4.0)
    read = Counter(order[:, 1].tolist())
    fitting = set(np.flatnonzero(open_shard(sources[2].directory("shards") / "chat-00000.bin").lengths <= 33).tolist())
    assert set(read) == fitting and max(read.values()) - min(read.values()) <= 2
    assert 3.0 < record.epochs_by_domain["chat"] < 4.0


def test_rows_of_best_fit_hold_whole_pieces_gaps_and_the_mask_of_the_conversations(toys):
    _, order, rows, sources = pack(toys)
    tokens, segments, trained = rows.rows(0, len(rows))
    assert (
        rows.is_segmented
        and tokens.shape == (100, 33)
        and (tokens.dtype, segments.dtype, trained.dtype) == ("int32", "int32", "bool")
    )
    gaps = segments == -1
    assert gaps.any() and not tokens[gaps].any() and not trained[gaps].any()
    seen = {}
    for row in range(100):
        for segment in set(segments[row].tolist()) - {-1}:
            seen[segment] = (tokens[row][segments[row] == segment], trained[row][segments[row] == segment])
    assert sorted(seen) == list(range(len(order)))
    for segment, (read_tokens, mask) in seen.items():
        shard, sequence, offset, length, _, _ = order[segment].tolist()
        source = open_shard(sources[shard].directory("shards") / f"{('code', 'web', 'chat')[shard]}-00000.bin")
        assert read_tokens.tolist() == source.tokens[source.starts[sequence] + offset :][:length].tolist()
        expected = [shard != 2 or index >= length // 2 for index in range(length)]
        assert mask.tolist() == [False, *expected[1:]]


def test_any_range_of_best_fit_rows_equals_that_part_of_all_rows(toys):
    rows = pack(toys)[2]
    whole = rows.rows(0, len(rows))
    for start in (0, 7, 99):
        assert all(
            np.array_equal(part, every[start : start + 1])
            for part, every in zip(rows.rows(start, start + 1), whole, strict=True)
        )


def test_a_stream_masks_what_no_assistant_wrote(toys):
    record, order, rows, _ = pack(toys, packing="stream")
    _, segments, trained = rows.rows(0, len(rows))
    is_chat = order[segments, 0] == 2
    assert trained[~is_chat].all() and 0.3 < trained[is_chat].mean() < 0.7
    assert not rows.is_segmented and record.fill_share == 1.0 and record.num_too_long == 0 and record.num_tokens == 3201


def test_a_mixture_without_conversations_ignores_their_shards_and_one_with_them_needs_no_web(toys):
    assert set(pack(toys, mixture={"web": 1.0})[0].tokens_by_domain) == {"web"}
    assert set(pack(toys, mixture={"chat": 1.0})[0].tokens_by_domain) == {"chat"}


CODE_IDS = [hashlib.sha256(str(number).encode()).hexdigest()[:16] for number in range(400)]
SPECIAL_IDS = {name: 1000 + number for number, name in enumerate(FIM_TOKENS)}
END = 999


class ToyTokenizer(Record):
    special_ids: dict[str, int]
    num_tokens: int


@step(content=("tokenizer.json",))
def write_tokenizer(*, output: Output) -> ToyTokenizer:
    output.path("tokenizer.json").write_text('{"model": {"vocab": {}}, "decoder": {"type": "ByteLevel"}}')
    return ToyTokenizer(special_ids=SPECIAL_IDS, num_tokens=1024)


@step(content=("shards/*",))
def write_code(*, output: Output) -> ToyShards:
    """Code and repositories of which some are longer than a row, each document with tokens of its own order, and web
    text."""
    longest = {"code": 60, "repository": 200, "web": 60}
    for number, (domain, most) in enumerate(longest.items()):
        draw = np.random.default_rng(number)
        sequences = [[*draw.integers(1, 900, draw.integers(1, most)).tolist(), END] for _ in CODE_IDS]
        write_shard(output, f"{domain}-00000", sequences)
        table = pa.table({"sequence": range(len(CODE_IDS)), "id": CODE_IDS})
        pq.write_table(table, output.path(f"shards/{domain}-00000.parquet"))
    names = tuple(f"{domain}-00000" for domain in longest)
    return ToyShards(shards=names, domains={name: name.split("-")[0] for name in names})


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    root = tmp_path_factory.mktemp("code")
    return root, compute(write_code, root), compute(write_tokenizer, root)


def pack_code(code, fim_rate, packing="best_fit", **changes):
    root, shards, tokenizer = code
    mixture = {"code": 0.4, "repository": 0.5, "web": 0.1}
    given = recipe(
        **{
            "num_tokens": 63 * 300,
            "sequence_length": 63,
            "mixture": mixture,
            "packing": packing,
            "fim_rate": fim_rate,
            **changes,
        }
    )
    packed = compute(
        pack_phase, root, shards=shards, chats=None, tokenizer=tokenizer if fim_rate else None, recipe=given
    )
    return (packed, packed_lines(packed), packed_rows(packed, shards))


def un_fim(tokens: list[int]) -> list[int]:
    """The document behind prefix, suffix, middle; what has no special token stays."""
    if SPECIAL_IDS["<|code_prefix|>"] not in tokens:
        return tokens
    indices = [tokens.index(SPECIAL_IDS[name]) for name in FIM_TOKENS]
    assert indices[0] == 0 and indices == sorted(indices), tokens
    prefix, suffix, middle = tokens[1 : indices[1]], tokens[indices[1] + 1 : indices[2]], tokens[indices[2] + 1 :]
    end = [END] if middle[-1:] == [END] else []
    return prefix + middle[: len(middle) - len(end)] + suffix + end


@pytest.mark.parametrize("fim_rate", [0.5, 1.0])
def test_un_fim_gives_back_the_documents_and_the_rate_is_the_configured_one(code, fim_rate):
    packed, order, rows = pack_code(code, fim_rate)
    tokens, segments, trained = rows.rows(0, len(rows))
    seen = {}
    for row in range(len(rows)):
        for document in set(segments[row].tolist()) - {-1}:
            assert document not in seen, "a document number lies in two rows"
            seen[document] = (
                tokens[row][segments[row] == document].tolist(),
                trained[row][segments[row] == document].tolist(),
            )
    originals = {
        number: open_shard(code[1].directory("shards") / f"{name}.bin")
        for number, name in enumerate(code[1].record.shards)
    }
    is_moved, counts = {}, Counter()
    for document, (read_tokens, mask) in seen.items():
        own = order[order[:, 5] == document]
        (shard,) = {int(number) for number in own[:, 0]} - {len(originals)}
        (sequence,) = {int(line[1]) for line in own if line[0] == shard}
        start, stop = (
            min(line[2] for line in own if line[0] == shard),
            max(line[2] + line[3] for line in own if line[0] == shard),
        )
        source = originals[shard]
        assert (
            un_fim(read_tokens)
            == source.tokens[source.starts[sequence] + start : source.starts[sequence] + stop].tolist()
        )
        assert mask == [False] + [True] * (len(read_tokens) - 1)
        moved = SPECIAL_IDS["<|code_prefix|>"] in read_tokens
        assert not (moved and shard == 2), "web text is never rearranged"
        if shard != 2 and stop - start >= 16:
            is_moved.setdefault(CODE_IDS[sequence], set()).add(moved)
            counts[moved] += 1
        assert not moved or stop - start >= 16
    assert all(len(claims) == 1 for claims in is_moved.values()), (
        "a document is rearranged in all its pieces or in none, by its id"
    )
    share = sum(claims == {True} for claims in is_moved.values()) / len(is_moved)
    assert abs(share - fim_rate) < 0.09 and packed.record.num_rearranged == counts[True]
    assert sum(packed.record.tokens_by_domain.values()) == order[:, 3].sum() == packed.record.num_tokens


def test_a_stream_with_fim_has_exact_tokens_and_documents_in_one_run(code):
    packed, order, rows = pack_code(code, 0.5, "stream", max_epochs=3.0)
    assert packed.record.num_rearranged > 50 and order[:, 3].sum() == 63 * 300 + 1
    assert (np.diff(order[:, 5]) >= 0).all() and (np.diff(order[:, 4]) == order[:-1, 3]).all()
    shares = allot_tokens(
        recipe(
            num_tokens=63 * 300,
            sequence_length=63,
            mixture={"code": 0.4, "repository": 0.5, "web": 0.1},
            max_epochs=3.0,
        ),
        dict.fromkeys(("code", "repository", "web"), 10**6),
        63 * 300 + 1,
    )
    assert packed.record.tokens_by_domain == shares
    assert len(rows) == 300


def test_fim_depends_on_the_documents_id_and_the_seed_alone(code):
    order = pack_code(code, 0.5)[1]
    assert np.array_equal(order, pack_code(code, 0.5)[1])
    _, other, _ = pack_code(code, 0.5, mixture={"code": 1.0}, num_tokens=63 * 100)
    glue = len(code[1].record.shards)

    def moved(given):
        special = set(given[given[:, 0] == glue, 5].tolist())
        return {int(line[1]) for line in given if line[0] == 0 and line[5] in special}

    read = {int(line[1]) for line in order if line[0] == 0} & {int(line[1]) for line in other if line[0] == 0}
    assert moved(order) & read == moved(other) & read != set()


def test_a_domain_without_text_is_said_and_leaves_its_share(code):
    record = pack_code(code, 0.0, mixture={"code": 0.5, "commit": 0.5})[0].record
    assert record.absent_domains == ("commit",) and set(record.tokens_by_domain) == {"code"}
