"""Rows read from a bucket equal rows read from a directory: shards of several blocks, conversations with a mask, an
order in parts; and what is read for them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import boto3
import numpy as np
import pytest

from configs.files.block_cache import BlockCache
from configs.files.block_reader import BlockReader
from configs.files.file_digests import BLOCK_BYTES, digests_of
from configs.files.stored_files import CorruptFileError, StoredFile
from tasks.data.packing.packed_order import part_name, write_part
from tasks.data.packing.packed_rows import PACKING_FILE, PackedRows
from tasks.data.shards.token_shard import token_dtype, write_index
from tests.support.faulty_s3 import no_fault, one_in, served_by
from tests.support.training_inputs import packed_lines

SEQUENCE_LENGTH, NUM_PIECES = 255, 1500
PART_ENDS = (400, 1002)
"""Of the order's first parts, in lines: where a document ends."""
SHARDS = {"web-00000": 150_000, "code-00000": 300, "chat-00000": 2_000}
"""Documents in each, of 1 to 63 tokens: web is larger than two blocks, its index larger than one."""
SMALL = {"web-00000": 500, "code-00000": 300, "chat-00000": 200}
EVERYTHING = 10**12
Places = tuple[list[StoredFile], list[StoredFile]]


def write_shards(directory: Path, dtype: np.dtype, shards: dict[str, int]) -> dict[str, np.ndarray]:
    """Token shards with random tokens; returns the lengths of their sequences."""
    draw, lengths = np.random.default_rng(11), {}
    for name, count in shards.items():
        lengths[name] = draw.integers(1, 64, count)
        tokens = draw.integers(0, 60_000, lengths[name].sum()).astype(dtype)
        (directory / f"{name}.bin").write_bytes(tokens.tobytes())
        write_index(directory / f"{name}.idx", lengths[name], dtype)
    (directory / "chat-00000.mask").write_bytes(draw.integers(0, 2, lengths["chat-00000"].sum()).astype("u1").tobytes())
    return lengths


def write_order(directory: Path, lengths: dict[str, np.ndarray], packing: str) -> None:
    """Random pieces of all shards, in three parts: one after the other in a stream, or with gaps between rows."""
    draw = np.random.default_rng(12)
    shard = draw.integers(0, len(SHARDS), NUM_PIECES)
    sequence = np.array([draw.integers(0, len(list(lengths.values())[number])) for number in shard])
    whole = np.array([lengths[list(SHARDS)[number]][index] for number, index in zip(shard, sequence, strict=True)])
    offset = draw.integers(0, whole)
    length = whole - offset
    if packing == "stream":
        slot = np.cumsum(length) - length
    else:  # three pieces to a row, wherever they fit
        slot = np.arange(NUM_PIECES) // 3 * (SEQUENCE_LENGTH + 1) + np.arange(NUM_PIECES) % 3 * 70
    document = np.arange(NUM_PIECES) // 2 if packing == "stream" else np.arange(NUM_PIECES)
    order = np.column_stack([shard, sequence, offset, length, slot, document]).astype(np.int64)
    parts = []
    for number, own in enumerate(np.split(order, PART_ENDS)):
        own[:, 5] -= own[0, 5]
        parts.append(write_part(directory / part_name(number), own))
    described = {"packing": packing, "sequence_length": SEQUENCE_LENGTH, "seed": 3, "shards": [*SHARDS], "parts": parts}
    (directory / PACKING_FILE).write_text(json.dumps({**described, "has_glue": False}))


def described(path: Path, directory: str) -> StoredFile:
    digests = digests_of(path)
    return StoredFile(f"{directory}/{path.name}", digests.size, digests.sha256, digests.blocks)


def placed(directory: Path, packing: str, vocab_size: int, shards: dict[str, int]) -> Places:
    """The same files in a directory and in a bucket."""
    write_order(directory, write_shards(directory, token_dtype(vocab_size), shards), packing)
    paths = sorted(path for path in directory.iterdir() if path.is_file())
    for path in paths:
        boto3.client("s3").upload_file(str(path), "glm46", f"{directory.name}/{path.name}")
    local, remote = (
        [described(path, where) for path in paths] for where in (str(directory), f"s3://glm46/{directory.name}")
    )
    return local, remote


@pytest.fixture(scope="module", params=[("stream", 60_000), ("stream", 100_000), ("best_fit", 100_000)])
def places(request, s3_server, tmp_path_factory):
    return placed(tmp_path_factory.mktemp("places"), *request.param, SHARDS)


def opened(files: list[StoredFile], cache_dir: Path, max_bytes: int = EVERYTHING) -> PackedRows:
    own = [file for file in files if file.name.startswith("order") or file.name == PACKING_FILE]
    return PackedRows(own, [file for file in files if file not in own], BlockReader(BlockCache(cache_dir, max_bytes)))


@pytest.mark.parametrize("max_bytes", [EVERYTHING, 3 * BLOCK_BYTES])
def test_rows_from_a_bucket_equal_rows_from_a_directory(places, max_bytes, s3_server, tmp_path):
    """Also through a server that fails at one request in five, and with a cache too small for them."""
    local, remote = places
    here = opened(local, tmp_path / "cache")
    with served_by(s3_server, one_in(5, 7)):
        there = opened(remote, tmp_path / "cache", max_bytes)
        assert len(here) == len(there)
        for start, stop in ((0, 3), (5, 6)):
            for one, other in zip(here.rows(start, stop), there.rows(start, stop), strict=True):
                assert one.dtype == other.dtype and np.array_equal(one, other)
        assert here.describe(4, 6) == there.describe(4, 6)
    here.close()
    there.close()


def test_rows_equal_the_pieces_of_the_order(places, tmp_path):
    """By a loop over the lines and files that are read whole."""
    local, _ = places
    rows = opened(local, tmp_path / "cache")
    tokens, segments, trained = rows.rows(0, len(rows))
    files = {file.name: Path(file.uri) for file in local}
    dtype = np.dtype("<u2") if files["web-00000.bin"].stat().st_size < 12 * 2**20 else np.dtype("<i4")
    values = [np.fromfile(files[f"{name}.bin"], dtype) for name in SHARDS]
    mask = np.fromfile(files["chat-00000.mask"], bool)
    starts = [
        np.frombuffer(files[f"{name}.idx"].read_bytes(), "<i8", SHARDS[name], 34 + 4 * SHARDS[name]) for name in SHARDS
    ]
    order = packed_lines(files[PACKING_FILE].parent)
    end = int((order[:, 4] + order[:, 3]).max()) + SEQUENCE_LENGTH
    flat, owner, kept = np.zeros(end, np.int32), np.full(end, -1), np.zeros(end, bool)
    for shard, sequence, offset, length, slot, document in order.tolist():
        begin = int(starts[shard][sequence]) // dtype.itemsize + offset
        flat[slot : slot + length] = values[shard][begin : begin + length]
        owner[slot : slot + length] = document
        kept[slot : slot + length] = mask[begin : begin + length] if shard == 2 else True
        if rows.is_segmented:
            kept[slot] = False
    stride = SEQUENCE_LENGTH + rows.is_segmented
    wanted = [np.concatenate([flat[at : at + SEQUENCE_LENGTH + 1]]) for at in range(0, len(rows) * stride, stride)]
    places_of = {tuple(row.tolist()): at for at, row in zip(range(0, len(rows) * stride, stride), wanted, strict=True)}
    found = [places_of[tuple(row.tolist())] for row in tokens]
    assert sorted(found) == list(range(0, len(rows) * stride, stride))
    for at, own_segments, own_trained in zip(found, segments, trained, strict=True):
        assert np.array_equal(own_segments, owner[at : at + SEQUENCE_LENGTH + 1])
        assert np.array_equal(own_trained, kept[at : at + SEQUENCE_LENGTH + 1])


def test_opening_reads_no_shard_and_a_row_reads_only_its_own(places, s3_server, tmp_path):
    _, remote = places
    with served_by(s3_server, no_fault) as server:
        rows = opened(remote, tmp_path / "cache")
        assert {request.path.rpartition("/")[2] for request in server.requests} == {PACKING_FILE, part_name(2)}
        read = {str(piece["file"]) for piece in rows.describe(0, 1)}
        requested = [request.path.rpartition("/")[2] for request in server.requests[2:]]
        shards = {re.sub(r"\..*", "", name) for name in requested if not name.startswith("order")}
        assert shards == {name[:-4] for name in read}


@pytest.mark.parametrize("name", ["web-00000.bin", "web-00000.idx", "chat-00000.mask", part_name(0), PACKING_FILE])
def test_a_changed_file_is_named_by_who_reads_it(name, s3_server, tmp_path):
    places = placed(tmp_path, "best_fit", 60_000, SMALL)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    boto3.client("s3").upload_file(str(path), "glm46", f"{tmp_path.name}/{name}")
    for files in places:
        uri = next(file.uri for file in files if file.name == name)
        with pytest.raises(CorruptFileError, match=rf"^{re.escape(uri)} is corrupt: the block at byte 0"):
            rows = opened(files, tmp_path / "cache")
            rows.rows(0, len(rows))


def test_a_shard_of_two_places_is_refused(places, tmp_path):
    local, remote = places
    with pytest.raises(AssertionError, match=r"shard chat-00000 is in .* and s3://"):
        opened(local + remote, tmp_path / "cache")
