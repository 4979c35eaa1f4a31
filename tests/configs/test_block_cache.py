"""Blocks of objects on this machine's disk: the committed bytes whatever happens to cache, server and other processes,
within the bound."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import boto3
import numpy as np
import pytest

from configs.files import block_cache
from configs.files.block_cache import BlockCache, node_cache
from configs.files.block_reader import BlockReader
from configs.files.file_digests import BLOCK_BYTES
from configs.files.stored_files import CorruptFileError, StoredFile, writing
from tests.support.faulty_s3 import no_fault, served_by

NUM_BLOCKS = 3


def random_bytes(seed: int, size: int = (NUM_BLOCKS - 1) * BLOCK_BYTES + 17) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def stored(uri: str, data: bytes) -> StoredFile:
    with writing(uri) as (file, written):
        file.write(data)
    return written[0]


@pytest.fixture
def file(s3_server, tmp_path):
    return stored(f"s3://glm46/{tmp_path.name}/file", random_bytes(1))


def blocks_in(cache_dir: Path) -> list[Path]:
    return sorted((cache_dir / "blocks").iterdir())


def num_bytes_in(cache_dir: Path) -> int:
    return sum(path.stat().st_size for path in blocks_in(cache_dir))


def whole(cache: BlockCache, file: StoredFile) -> bytes:
    return b"".join(bytes(cache.read(file, number)) for number in range(max(len(file.blocks), 1)))


def test_each_block_is_requested_once(file, s3_server, tmp_path):
    with served_by(s3_server, no_fault) as server:
        for _ in range(2):
            assert whole(BlockCache(tmp_path / "cache", 10**9), file) == random_bytes(1)
    assert len(server.requests) == NUM_BLOCKS and num_bytes_in(tmp_path / "cache") == file.size


@pytest.mark.parametrize("fault", ["500", "503", "reset", "lost", "cut"])
def test_a_request_whose_answer_fails_is_made_again(file, fault, s3_server, tmp_path):
    left = [fault, fault]
    with served_by(s3_server, lambda request: left.pop() if left else "") as server:
        assert whole(BlockCache(tmp_path / "cache", 10**9), file) == random_bytes(1)
    assert len(server.faults) == 2


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"cut")])
def test_a_damaged_block_is_fetched_again(file, damage, s3_server, tmp_path):
    whole(BlockCache(tmp_path / "cache", 10**9), file)
    for path in blocks_in(tmp_path / "cache"):
        damage(path)
    with served_by(s3_server, no_fault) as server:
        for _ in range(2):
            assert whole(BlockCache(tmp_path / "cache", 10**9), file) == random_bytes(1)
    assert len(server.requests) == NUM_BLOCKS


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:-1] + b"\0", "the block at byte 8388608 has another digest"),
        (lambda data: data[:-5], f"it ends at byte {2 * BLOCK_BYTES + 12} of"),
        (lambda data: data[:50], f"it ends at byte {2 * BLOCK_BYTES} of"),
        (None, "it was removed"),
    ],
)
def test_an_object_that_changed_is_refused_by_name(file, change, problem, tmp_path):
    client, key = boto3.client("s3"), f"{tmp_path.name}/file"
    if change is None:
        client.delete_object(Bucket="glm46", Key=key)
    else:
        client.put_object(Bucket="glm46", Key=key, Body=change(random_bytes(1)))
    with pytest.raises(CorruptFileError, match=rf"{tmp_path.name}/file is corrupt: {problem}.*Run again"):
        BlockCache(tmp_path / "cache", 10**9).read(file, NUM_BLOCKS - 1)
    assert not blocks_in(tmp_path / "cache")


def test_the_cache_stays_within_its_bound_and_keeps_what_was_used_last(s3_server, tmp_path):
    size, bound = 100_000, 1_000_000
    files = [stored(f"s3://glm46/{tmp_path.name}/{number}", random_bytes(number, size)) for number in range(25)]
    cache = BlockCache(tmp_path / "cache", bound)
    favourite = cache.read(files[0], 0)
    for number, file in enumerate(files):
        assert cache.read(file, 0)[:] == random_bytes(number, size)
        assert num_bytes_in(tmp_path / "cache") <= bound
        cache.read(files[0], 0)
        time.sleep(0.002)  # the clock of some file systems is that coarse
    assert num_bytes_in(tmp_path / "cache") >= 0.7 * bound
    with served_by(s3_server, no_fault) as server:
        for number in (0, 24, 23, 1):
            cache.read(files[number], 0)
    assert [request.path for request in server.requests] == [f"/glm46/{tmp_path.name}/1"]
    for path in blocks_in(tmp_path / "cache"):
        path.unlink()
    assert favourite[:] == random_bytes(0, size), "what was given out stays readable"


def test_a_block_larger_than_the_bound_is_read_and_not_kept(file, tmp_path):
    assert whole(BlockCache(tmp_path / "cache", 1000), file) == random_bytes(1)
    assert num_bytes_in(tmp_path / "cache") == 17


def test_the_cache_of_the_machine_takes_half_of_the_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr(block_cache.tempfile, "tempdir", str(tmp_path))
    first = node_cache()
    free = block_cache.shutil.disk_usage(tmp_path).free
    assert first._max_bytes == pytest.approx(free / 2, rel=0.1)
    assert [path.name for path in tmp_path.iterdir()] == [f"glm46-blocks-{os.getuid()}"]
    monkeypatch.setattr(block_cache, "MIN_BYTES", 2 * free)
    with pytest.raises(ValueError, match=rf"{tmp_path}/glm46-blocks-.* set TMPDIR to a disk with more room"):
        node_cache()


def read_some(cache_dir: Path, files: list[StoredFile], seed: int, bound: int) -> tuple[list[bytes], int]:
    """Digests of what one of several processes reads, and the largest size of the cache that it saw."""
    cache, most = BlockCache(cache_dir, bound), 0
    digests = []
    for index in np.random.default_rng(seed).integers(0, len(files), 80).tolist():
        digests.append((index, hashlib.sha256(cache.read(files[index], 0)).hexdigest()))
        held = 0
        for path in blocks_in(cache_dir):
            try:
                held += path.stat().st_size
            except FileNotFoundError:
                continue
        most = max(most, held)
    return digests, most


def test_processes_share_a_cache_while_one_is_killed(s3_server, tmp_path):
    """Readers evict each other's blocks; what the killed one leaves is removed, and no lock stays."""
    size, bound = 50_000, 400_000
    files = [stored(f"s3://glm46/{tmp_path.name}/{number}", random_bytes(number, size)) for number in range(20)]
    context = multiprocessing.get_context("spawn")
    victim = context.Process(target=read_for_ever, args=(tmp_path / "cache", files, bound))
    victim.start()
    while not (tmp_path / "cache" / "blocks").exists() or not blocks_in(tmp_path / "cache"):
        time.sleep(0.01)
    threading.Timer(0.3, lambda: os.kill(victim.pid or 0, signal.SIGKILL)).start()
    with ProcessPoolExecutor(3, mp_context=context) as readers:
        read = [readers.submit(read_some, tmp_path / "cache", files, seed, bound) for seed in range(3)]
        results = [reader.result() for reader in read]
    victim.join()
    for digests, most in results:
        assert all(digest == files[index].sha256 for index, digest in digests) and most <= bound
    (tmp_path / "cache" / "blocks" / ".left-by-a-killed-process").write_bytes(b"half a block")
    read_some(tmp_path / "cache", files, 9, bound)
    assert not [path for path in blocks_in(tmp_path / "cache") if path.name.startswith(".")]
    assert num_bytes_in(tmp_path / "cache") <= bound


def read_for_ever(cache_dir: Path, files: list[StoredFile], bound: int) -> None:
    while True:
        read_some(cache_dir, files, os.getpid(), bound)


def test_one_of_many_threads_requests_a_block(file, s3_server, tmp_path):
    readers = [BlockReader(BlockCache(tmp_path / "cache", 10**9)) for _ in range(3)]
    with served_by(s3_server, no_fault) as server:
        threads = [
            threading.Thread(target=reader.fetch, args=([(file, number) for number in range(NUM_BLOCKS)],))
            for reader in readers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(server.requests) == NUM_BLOCKS
    for reader in readers:
        assert bytes(reader.block(file, 1)) == random_bytes(1)[BLOCK_BYTES : 2 * BLOCK_BYTES]
        reader.close()


@pytest.mark.parametrize("where", ["directory", "s3"])
def test_a_block_that_does_not_have_its_digest_is_never_given_out(where, tmp_path, request):
    if where == "s3":
        request.getfixturevalue("s3_server")
    uri = f"s3://glm46/{tmp_path.name}/file" if where == "s3" else str(tmp_path / "file")
    given = stored(uri, random_bytes(1))
    wrong = replace(given, blocks=(given.blocks[0], "0" * 32, given.blocks[2]))
    with BlockReader(BlockCache(tmp_path / "cache", 10**9)) as reader:
        assert bytes(reader.block(wrong, 0)) == random_bytes(1)[:BLOCK_BYTES]
        for read in (lambda: reader.block(wrong, 1), lambda: reader.fetch([(wrong, 1)])):
            with pytest.raises(
                CorruptFileError, match=r"file is corrupt: the block at byte 4194304 has another digest"
            ):
                read()
        with pytest.raises(CorruptFileError, match="nothing is corrupt: it was removed"):
            reader.block(replace(wrong, uri=uri.replace("file", "nothing"), sha256="1" * 64), 0)
