"""Stored files by block, each verified at its first use: local files are mapped into memory, objects in S3 are fetched
into the machine's cache."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import TracebackType
from typing import TypeVar

from configs.files.block_cache import BlockCache, node_cache
from configs.files.s3_objects import S3
from configs.files.stored_files import CorruptFileError, StoredFile, read_block

T = TypeVar("T")
R = TypeVar("R")
NUM_THREADS = 10
"""Requests at once: the connections that a client of botocore keeps open."""


class BlockReader:
    """Blocks of any number of files; close it after use. No method holds a file whole in memory."""

    def __init__(self, cache: BlockCache | None = None) -> None:
        """`cache` is another cache than that of this machine."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="blocks")
        self._given_cache = cache
        self._maps: dict[str, mmap.mmap] = {}
        self._verified: set[tuple[str, int]] = set()

    @cached_property
    def _cache(self) -> BlockCache:
        return self._given_cache or node_cache()

    def block(self, file: StoredFile, number: int) -> bytes | memoryview | mmap.mmap:
        """The bytes of one block. Raises CorruptFileError."""
        if file.uri.startswith(S3):
            return self._cache.read(file, number)
        begin, end = file.bounds(number)
        if (file.uri, number) not in self._verified:
            self._open(file, number)
        return memoryview(self._maps[file.uri])[begin:end]

    def fetch(self, blocks: Iterable[tuple[StoredFile, int]]) -> None:
        """Bring blocks to this machine and verify them, several at once."""
        wanted = {(file.uri, number): (file, number) for file, number in blocks}
        missing = [(file, number) for file, number in wanted.values() if not self._is_here(file, number)]

        def bring(block: tuple[StoredFile, int]) -> None:
            self.block(*block)  # its bytes are dropped: those of a whole step would fill the memory

        self.map(bring, missing)

    def map(self, function: Callable[[T], R], values: Iterable[T]) -> list[R]:
        """Results in the order of the values, several computed at once; the function must not call `map` or `fetch`."""
        return list(self._threads.map(function, values))

    def _is_here(self, file: StoredFile, number: int) -> bool:
        if file.uri.startswith(S3):
            return self._cache.has(file, number)
        return (file.uri, number) in self._verified

    def _open(self, file: StoredFile, number: int) -> None:
        """Map a local file and verify a block of it. The block is read, not mapped, for that: it would count as this
        process's memory."""
        try:
            descriptor = os.open(file.uri, os.O_RDONLY)
        except FileNotFoundError as error:
            raise CorruptFileError(file.uri, "it was removed") from error
        try:
            read_block(file, number, descriptor)
            if file.uri not in self._maps:
                self._maps[file.uri] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self._verified.add((file.uri, number))

    def close(self) -> None:
        """End the threads. Blocks that were given out stay readable."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
