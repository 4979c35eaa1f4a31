"""Parcels: batches of small rows that go through a Spark shuffle as one.

A row of a few numbers costs Spark more to move than to use. A parcel is an Arrow table in one binary cell, addressed
to a partition. Document ids are 64 bits wide, written as 16 hex digits: parcels carry them as numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]

PARCEL_COLUMNS = "kind string, target int, num_rows long, payload binary"
PARCEL_ROWS = 1 << 18
"""Rows that a sender gathers before it ships them."""
PARCEL_BYTES = 4 * 2**20
"""Approximate size of a parcel: Spark holds several at once, in a task's memory outside the heap."""
HEX_DIGITS = 16
"""Of a 64-bit number."""


def id_numbers(ids: pa.Array | pa.ChunkedArray) -> U64:
    """Document ids as numbers."""
    return _hex_numbers(ids, 1)[:, 0]


def digest_numbers(digests: pa.Array | pa.ChunkedArray) -> tuple[U64, U64]:
    """The first 128 bits of SHA-256 digests, as two numbers: as many as tell contents apart."""
    numbers = _hex_numbers(digests, 4)
    return numbers[:, 0], numbers[:, 1]


def _hex_numbers(texts: pa.Array | pa.ChunkedArray, width: int) -> U64:
    """(texts, width): the 64-bit numbers that each text writes as hex digits."""
    import pyarrow as pa

    joined = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    if not len(joined):
        return np.empty((0, width), dtype=np.uint64)
    bytes_per_offset = 4 if pa.types.is_string(joined.type) else 8
    _, offsets, data = joined.buffers()
    ends = np.frombuffer(offsets, dtype=f"<i{bytes_per_offset}")[[joined.offset, joined.offset + len(joined)]]
    digits = data.to_pybytes()[int(ends[0]) : int(ends[1])]
    num_digits = HEX_DIGITS * width
    assert len(digits) == num_digits * len(joined), f"document ids and digests are {num_digits} hex digits"
    return np.frombuffer(bytes.fromhex(digits.decode("ascii")), dtype=">u8").astype(np.uint64).reshape(-1, width)


def id_strings(numbers: U64) -> pa.Array:
    """Numbers as document ids."""
    import pyarrow as pa

    offsets = np.arange(0, HEX_DIGITS * (len(numbers) + 1), HEX_DIGITS, dtype=np.int32)
    digits = numbers.astype(">u8").tobytes().hex().encode("ascii")
    return pa.StringArray.from_buffers(len(numbers), pa.py_buffer(offsets), pa.py_buffer(digits))


def id_range(numbers: U64, count: int) -> NDArray[np.int64]:
    """The index, among `count` equal ranges, of the one that holds each id: as parquet_parts.bucket_of."""
    return ((numbers >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)).astype(np.int64)


def packed(table: pa.Table) -> bytes:
    """A table as an Arrow stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def unpacked(batches: Iterator[pa.RecordBatch]) -> dict[str, pa.Table]:
    """The received parcels, as one table per kind."""
    import pyarrow as pa

    tables: dict[str, list[pa.Table]] = {}
    for batch in batches:
        for kind, payload in zip(batch.column("kind").to_pylist(), batch.column("payload"), strict=True):
            tables.setdefault(kind, []).append(pa.ipc.open_stream(payload.as_buffer()).read_all())
    return {kind: pa.concat_tables(parts).combine_chunks() for kind, parts in tables.items()}


def addressed(kind: str, table: pa.Table, targets: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """PARCEL_COLUMNS: one parcel of `kind` for every target, with the rows that go there."""
    import pyarrow as pa

    order = np.argsort(targets, kind="stable")
    present, starts = np.unique(targets[order], return_index=True)
    sizes = np.diff(np.append(starts, len(order)))
    ordered = table.take(pa.array(order))
    for target, start, size in zip(present.tolist(), starts.tolist(), sizes.tolist(), strict=True):
        yield from parcels(kind, target, ordered.slice(start, size))


def parcels(kind: str, target: int, table: pa.Table) -> Iterator[pa.RecordBatch]:
    """PARCEL_COLUMNS: a table's rows, in as many parcels as PARCEL_BYTES asks for."""
    rows = max(PARCEL_BYTES * table.num_rows // max(table.nbytes, 1), 1)
    for start in range(0, table.num_rows, rows):
        yield _parcel(kind, target, table.slice(start, rows))


def _parcel(kind: str, target: int, table: pa.Table) -> pa.RecordBatch:
    import pyarrow as pa

    columns = [
        pa.array([kind]),
        pa.array([target], pa.int32()),
        pa.array([table.num_rows], pa.int64()),
        pa.array([packed(table)], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=["kind", "target", "num_rows", "payload"])
