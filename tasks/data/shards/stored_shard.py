"""A shard in the store, whose sequences are read by number: nothing is read when it is described, and no index is read
whole. Runs in training ranks: imports only NumPy at the top."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np

from configs.files.block_reader import BlockReader
from configs.files.stored_files import StoredFile, VerifiedReader
from tasks.data.shards.stored_array import StoredArray
from tasks.data.shards.token_shard import HEADER_BYTES, IndexHeader, read_header, read_lengths, refuse_other_size

BYTE, LENGTH, POINTER = np.dtype(np.uint8), np.dtype("<i4"), np.dtype("<i8")


class StoredShard:
    """Every use raises ValueError, which names the file, where header, counts or sizes do not match or a block has
    another digest."""

    def __init__(self, name: str, files: dict[str, StoredFile], blocks: BlockReader) -> None:
        """`files` by ending: bin, idx; mask of conversations; parquet, the documents of the sequences."""
        if "bin" not in files:
            directory = files["idx"].directory
            raise ValueError(f"{directory}/{name}.bin is missing beside its index: shard the documents again")
        self.file = files["bin"]
        self._files, self._blocks = files, blocks
        self._index = StoredArray(files["idx"], blocks, BYTE)

    @cached_property
    def header(self) -> IndexHeader:
        index = self._files["idx"]
        start = bytes(self._blocks.block(index, 0)[:HEADER_BYTES]) if index.size else b""
        header = read_header(start, index.size, index.uri)
        last = np.array([header.num_sequences - 1])[: header.num_sequences]
        num_bytes = self._values(header.pointers_begin, POINTER, last)
        num_tokens = self._values(header.lengths_begin, LENGTH, last).sum() + num_bytes.sum() // header.dtype.itemsize
        refuse_other_size(self.file.uri, self.file.size, int(num_tokens), header.dtype)
        return header

    @cached_property
    def tokens(self) -> StoredArray:
        return StoredArray(self.file, self._blocks, self.header.dtype)

    @cached_property
    def mask(self) -> StoredArray | None:
        """Whether each token is trained; None for a shard of documents, where every token is."""
        file = self._files.get("mask")
        if file is not None and file.size != len(self.tokens):
            raise ValueError(
                f"{file.uri} has {file.size} bytes for {len(self.tokens)} tokens: shard the conversations again"
            )
        return None if file is None else StoredArray(file, self._blocks, np.dtype(np.bool_))

    def starts(self, sequences: np.ndarray) -> np.ndarray:
        """First token of each of these sequences, in tokens."""
        return self._values(self.header.pointers_begin, POINTER, sequences) // self.header.dtype.itemsize

    def lengths(self) -> np.ndarray:
        """Tokens of every sequence, int64: reads the index whole."""
        index = self._files["idx"]
        with VerifiedReader(index) as file:
            dtype, lengths = read_lengths(file.read(), index.uri)
        refuse_other_size(self.file.uri, self.file.size, int(lengths.sum()), dtype)
        return lengths

    def sequence(self, number: int) -> np.ndarray:
        """The tokens of one sequence."""
        chosen = np.array([number])
        length = self._values(self.header.lengths_begin, LENGTH, chosen)[0]
        return self.tokens.take(self.starts(chosen) + np.arange(length))

    def blocks_of(self, positions: np.ndarray) -> Iterator[tuple[StoredFile, int]]:
        """The blocks that hold tokens and mask at these positions."""
        yield from self.tokens.blocks_of(positions)
        if self.mask is not None:
            yield from self.mask.blocks_of(positions)

    def document_ids(self) -> dict[int, str]:
        """Document of each sequence; empty without a sidecar."""
        sidecar = self._files.get("parquet")
        if sidecar is None:
            return {}
        import pyarrow.parquet as pq

        with VerifiedReader(sidecar) as file:
            columns = pq.read_table(file, columns=["sequence", "id"]).to_pydict()
        return dict(zip(columns["sequence"], columns["id"], strict=True))

    def _values(self, begin: int, dtype: np.dtype, sequences: np.ndarray) -> np.ndarray:
        """The index is not aligned: its values are put together from bytes."""
        positions = (begin + sequences * dtype.itemsize)[:, None] + np.arange(dtype.itemsize)
        return self._index.take(positions.ravel()).view(dtype)


def open_shards(files: Iterable[StoredFile], blocks: BlockReader) -> dict[str, StoredShard]:
    """The shards that have an index among these files, by name; nothing is read. Raises ValueError for one without
    tokens."""
    parts: dict[str, dict[str, StoredFile]] = {}
    for file in files:
        name, _, ending = file.name.rpartition(".")
        own = parts.setdefault(name, {})
        assert ending not in own, f"shard {name} is in {own[ending].directory} and {file.directory}"
        own[ending] = file
    return {name: StoredShard(name, own, blocks) for name, own in parts.items() if "idx" in own}
