"""Files of the store in verified blocks: the bytes of a local file, whole or by position, here and in S3."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs.files.file_digests import BLOCK_BYTES, digests_of
from configs.files.stored_files import CorruptFileError, StoredFile, VerifiedReader, given_file, local_copy, writing

SIZES = (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 17)


def random_bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def stored(uri: str, data: bytes) -> StoredFile:
    """Written in uneven pieces."""
    with writing(uri) as (file, written):
        for start in range(0, len(data), 1_000_003):
            file.write(data[start : start + 1_000_003])
    (made,) = written
    return made


def address(where: str, tmp_path, request) -> str:
    if where == "directory":
        return str(tmp_path / "parts" / "file")
    request.getfixturevalue("s3_server")
    return f"s3://glm46/{tmp_path.name}/file"


@pytest.mark.parametrize("where", ["directory", "s3"])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read_at_every_position(where, size, tmp_path, request):
    data = random_bytes(size)
    file = stored(address(where, tmp_path, request), data)
    assert (file.size, file.sha256) == (size, hashlib.sha256(data).hexdigest())
    assert len(file.blocks) == (0 if size <= BLOCK_BYTES else -(-size // BLOCK_BYTES))
    with VerifiedReader(file) as reader:
        assert reader.read() == data
        for position in (0, 1, size // 2, max(size - 5, 0), size):
            reader.seek(position)
            assert reader.read(70_000) == data[position : position + 70_000]
        assert reader.seek(-min(3, size), io.SEEK_END) == size - min(3, size)
    with open(local_copy(file), "rb") as copy:
        assert copy.read() == data
    assert digests_of(Path(local_copy(file))).blocks == file.blocks


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_changed_byte_is_seen_by_who_reads_its_block_and_only_there(size, tmp_path):
    data = bytearray(random_bytes(size))
    file = stored(str(tmp_path / "file"), bytes(data))
    data[-1] ^= 1
    (tmp_path / "file").write_bytes(data)
    with VerifiedReader(file) as reader, pytest.raises(CorruptFileError, match="file is corrupt: the block at byte"):
        reader.seek(size - 1)
        reader.read(1)
    if size > BLOCK_BYTES:
        with VerifiedReader(file) as reader:
            assert reader.read(10) == bytes(data[:10])
    with pytest.raises(CorruptFileError, match="its sha256 is another"):
        local_copy(file)


def test_a_file_that_became_shorter_is_corrupt(tmp_path):
    file = stored(str(tmp_path / "file"), random_bytes(100))
    (tmp_path / "file").write_bytes(random_bytes(100)[:50])
    with VerifiedReader(file) as reader, pytest.raises(CorruptFileError, match="it ends at byte 50 of 100"):
        reader.read()


def test_a_file_of_blocks_without_their_digests_is_verified_as_a_whole(tmp_path):
    file = replace(stored(str(tmp_path / "file"), random_bytes(2 * BLOCK_BYTES)), blocks=())
    with VerifiedReader(file) as reader:
        assert reader.read() == random_bytes(2 * BLOCK_BYTES)
    with VerifiedReader(replace(file, sha256="0" * 64)) as reader, pytest.raises(CorruptFileError):
        reader.read(1)


def test_a_file_of_a_user_is_read_as_it_is(tmp_path):
    (tmp_path / "file").write_bytes(b"anything")
    with VerifiedReader(given_file(tmp_path / "file")) as reader:
        assert reader.read() == b"anything"


@pytest.mark.parametrize("where", ["directory", "s3"])
def test_a_writer_that_fails_leaves_nothing(where, tmp_path, request):
    uri = address(where, tmp_path, request)
    with pytest.raises(OSError, match="no more"), writing(uri) as (file, written):
        file.write(b"half of it")
        raise OSError("no more")
    assert not written
    if where == "directory":
        assert not list((tmp_path / "parts").iterdir())
    else:
        import boto3

        assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket="glm46", Prefix=f"{tmp_path.name}/")
