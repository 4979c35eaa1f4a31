"""Writes Megatron's indexed dataset, .bin and .idx, in one pass. Runs in executors: imports no Spark.

A shard of conversations has a .mask beside them: one byte per token of the .bin, 1 where it is trained.

Layout (megatron.core.datasets.indexed_dataset): the .bin holds the tokens of all sequences one after the other. The
.idx holds magic, version, dtype code, counts, sequence lengths (int32), byte pointers (int64) and document bounds
(int64). There is one sequence per document.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 9 + 16
DTYPE_CODES = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
MAX_UINT16_VOCABULARY = 65_500
"""Megatron stores smaller vocabularies in 16 bits (DType.optimal_dtype)."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which Megatron stores ids of a vocabulary of this size."""
    return DTYPE_CODES[8] if vocab_size < MAX_UINT16_VOCABULARY else DTYPE_CODES[4]


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Write the .idx of sequences with these lengths, each a document of its own."""
    path.write_bytes(index_bytes(lengths, dtype))


def index_bytes(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """What the .idx holds."""
    code = next(code for code, known in DTYPE_CODES.items() if known == dtype)
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1] * dtype.itemsize, out=pointers[1:])
    header = MAGIC + struct.pack("<QB", VERSION, code) + struct.pack("<QQ", len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    return header + lengths.astype("<i4").tobytes() + pointers.tobytes() + documents.tobytes()


def append_tokens(file: IO[bytes], sequences: list[list[int]], dtype: np.dtype) -> np.ndarray:
    """Append sequences to an open .bin; returns their lengths, int64."""
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    flat = (
        np.concatenate([np.asarray(sequence, dtype=dtype) for sequence in sequences])
        if sequences
        else np.zeros(0, dtype)
    )
    file.write(flat.tobytes())
    return lengths


@dataclass(frozen=True)
class TokenShard:
    """An opened shard, its tokens memory-mapped."""

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    """First token of each sequence, in tokens."""


@dataclass(frozen=True)
class IndexHeader:
    """What an .idx says before its sequences."""

    dtype: np.dtype
    num_sequences: int

    @property
    def lengths_begin(self) -> int:
        """First byte of the lengths (int32)."""
        return HEADER_BYTES

    @property
    def pointers_begin(self) -> int:
        """First byte of the pointers (int64)."""
        return HEADER_BYTES + 4 * self.num_sequences


def read_header(start: bytes, size: int, index_path: str | Path) -> IndexHeader:
    """Of an .idx of `size` bytes from its first HEADER_BYTES. Raises ValueError, which names the file."""
    if len(start) < HEADER_BYTES or start[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{index_path} is not a Megatron index: shard the documents again")
    version, code = struct.unpack_from("<QB", start, len(MAGIC))
    count, num_bounds = struct.unpack_from("<QQ", start, len(MAGIC) + 9)
    if version != VERSION or code not in DTYPE_CODES or size != HEADER_BYTES + 12 * count + 8 * num_bounds:
        raise ValueError(
            f"{index_path} is cut short or damaged ({size} bytes for {count} sequences): shard the documents again"
        )
    return IndexHeader(DTYPE_CODES[code], count)


def refuse_other_size(bin_path: str | Path, size: int, num_tokens: int, dtype: np.dtype) -> None:
    """Raises ValueError where a .bin does not hold the tokens of its index."""
    if size != num_tokens * dtype.itemsize:
        raise ValueError(f"{bin_path} has {size} bytes, its index says {num_tokens} tokens: shard the documents again")


def open_shard(bin_path: Path) -> TokenShard:
    """Map a shard. Raises ValueError, which names the file, where header, counts or sizes do not match."""
    index_path = bin_path.with_suffix(".idx")
    dtype, lengths = read_lengths(index_path.read_bytes(), index_path)
    size = _size_of(bin_path)
    refuse_other_size(bin_path, size, int(lengths.sum()), dtype)
    tokens = np.memmap(bin_path, dtype=dtype, mode="r") if size else np.zeros(0, dtype)
    return TokenShard(tokens, lengths, np.cumsum(lengths) - lengths)


def read_lengths(data: bytes, index_path: str | Path) -> tuple[np.dtype, np.ndarray]:
    """The dtype of the tokens and the length of every sequence (int64), from the bytes of an .idx. Raises ValueError,
    which names the file."""
    header = read_header(data[:HEADER_BYTES], len(data), index_path)
    lengths = np.frombuffer(data, "<i4", header.num_sequences, header.lengths_begin).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", header.num_sequences, header.pointers_begin)
    starts = np.cumsum(lengths) - lengths
    if (lengths < 0).any() or not np.array_equal(pointers, starts * header.dtype.itemsize):
        raise ValueError(f"{index_path} is damaged (its sequences are not contiguous): shard the documents again")
    return header.dtype, lengths


def _size_of(bin_path: Path) -> int:
    if not bin_path.exists():
        raise ValueError(f"{bin_path} is missing beside its index: shard the documents again")
    return bin_path.stat().st_size
