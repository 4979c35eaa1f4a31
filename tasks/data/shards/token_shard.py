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


def open_shard(bin_path: Path) -> TokenShard:
    """Map a shard. Raises ValueError, which names the file, where header, counts or sizes do not match."""
    index_path = bin_path.with_suffix(".idx")
    data = index_path.read_bytes()
    header = len(MAGIC) + 9 + 16
    if len(data) < header or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{index_path} is not a Megatron index: shard the documents again")
    version, code = struct.unpack_from("<QB", data, len(MAGIC))
    count, num_bounds = struct.unpack_from("<QQ", data, len(MAGIC) + 9)
    if version != VERSION or code not in DTYPE_CODES or len(data) != header + 12 * count + 8 * num_bounds:
        raise ValueError(
            f"{index_path} is cut short or damaged ({len(data)} bytes for {count} sequences): shard the documents again"
        )
    dtype = DTYPE_CODES[code]
    lengths = np.frombuffer(data, "<i4", count, header).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", count, header + 4 * count)
    starts = np.cumsum(lengths) - lengths
    if (lengths < 0).any() or not np.array_equal(pointers, starts * dtype.itemsize):
        raise ValueError(f"{index_path} is damaged (its sequences are not contiguous): shard the documents again")
    size = _size_of(bin_path)
    if size != lengths.sum() * dtype.itemsize:
        raise ValueError(
            f"{bin_path} has {size} bytes, its index says {lengths.sum()} tokens: shard the documents again"
        )
    return TokenShard(np.memmap(bin_path, dtype=dtype, mode="r") if size else np.zeros(0, dtype), lengths, starts)


def open_mask(bin_path: Path, num_tokens: int) -> np.ndarray | None:
    """Map the mask of a shard's tokens as booleans; None for a shard of documents, where every token is trained. Raises
    ValueError, which names the file, where it does not hold one value per token."""
    path = bin_path.with_suffix(".mask")
    if not path.exists():
        return None
    if path.stat().st_size != num_tokens:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes for {num_tokens} tokens: shard the conversations again"
        )
    return np.memmap(path, dtype=np.bool_, mode="r") if num_tokens else np.zeros(0, np.bool_)


def _size_of(bin_path: Path) -> int:
    if not bin_path.exists():
        raise ValueError(f"{bin_path} is missing beside its index: shard the documents again")
    return bin_path.stat().st_size
