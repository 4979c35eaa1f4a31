"""Writes the tables of dropped documents, one range of ids after the other. Runs in executors: imports no Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from tasks.data.deduplication.duplicate_verdicts import DROPPED, NEIGHBOURS
from tasks.data.deduplication.exact_groups import REASONS
from tasks.data.records.documents import DROPPED_COLUMNS, arrow_schema
from tasks.data.records.documents_by_id import read_by_id
from tasks.data.records.parcels import id_strings, unpacked
from tasks.data.records.parquet_parts import WrittenPart, part_row, write_rows

if TYPE_CHECKING:
    import pyarrow as pa

    from configs.files.stored_files import StoredFile

EXAMPLE_COLUMNS = f"{DROPPED_COLUMNS}, source string"
DROPPED_FILE, NEIGHBOURS_FILE = "dropped.parquet", "neighbours.parquet"
NEIGHBOUR_COLUMNS = "id string, kept_id string, neighbour_id string, num_shared long, num_union long, similarity double"


def removed_schemas() -> dict[str, pa.Schema]:
    """The columns of both tables by their file; every dropped document has a reason."""
    dropped = arrow_schema(DROPPED_COLUMNS)
    at = dropped.get_field_index("reason")
    return {
        DROPPED_FILE: dropped.set(at, dropped.field(at).with_nullable(False)),
        NEIGHBOURS_FILE: arrow_schema(NEIGHBOUR_COLUMNS),
    }


def write_removed(batches: Iterator[pa.RecordBatch], directory: str) -> Iterator[pa.RecordBatch]:
    """Write dropped.parquet and neighbours.parquet below `directory` for DROPPED and NEIGHBOURS parcels, sorted by kind
    and target; no rows, no file. PART_COLUMNS for each file, where only dropped documents are counted, by reason."""
    tables: dict[str, tuple[str, Callable[[pa.Table], pa.Table]]] = {
        DROPPED: (DROPPED_FILE, dropped_rows),
        NEIGHBOURS: (NEIGHBOURS_FILE, neighbour_rows),
    }
    for kind, of_kind in groupby(_single_rows(batches), key=lambda row: row.column("kind")[0].as_py()):
        name, rows_of = tables[kind]
        rows = (batch for table in _ranges(of_kind) for batch in rows_of(table).to_batches())
        part = write_rows(next(rows), rows, f"{directory}/{name}", ("reason",) if kind == DROPPED else ())
        yield part_row(part if kind == DROPPED else WrittenPart(part.file))


def dropped_rows(dropped: pa.Table) -> pa.Table:
    """Rows of dropped.parquet for DROPPED columns."""
    import pyarrow as pa

    reasons = pa.array(REASONS).take(dropped.column("reason").combine_chunks())
    columns = [_ids(dropped, "id"), reasons, _ids(dropped, "kept")]
    return pa.table(columns, schema=removed_schemas()[DROPPED_FILE])


def neighbour_rows(neighbours: pa.Table) -> pa.Table:
    """Rows of neighbours.parquet for NEIGHBOURS columns."""
    import pyarrow as pa

    shared, union = (neighbours.column(name).to_numpy() for name in ("num_shared", "num_union"))
    columns = {"id": _ids(neighbours, "id"), "kept_id": _ids(neighbours, "kept")}
    columns["neighbour_id"] = _ids(neighbours, "neighbour")
    return pa.table(columns | {"num_shared": shared, "num_union": union, "similarity": shared / union})


def removed_examples(
    batches: Iterator[pa.RecordBatch], collection: str, files: list[StoredFile], count: int
) -> Iterator[pa.RecordBatch]:
    """EXAMPLE_COLUMNS of the `count` first dropped documents of a collection, for DROPPED parcels."""
    import pyarrow as pa
    import pyarrow.compute as pc

    dropped = unpacked(batches).get(DROPPED)
    if dropped is None:
        return
    of_collection = dropped.filter(pc.equal(pc.cast(dropped.column("collection"), "string"), collection))  # pyright: ignore[reportAttributeAccessIssue]
    first = of_collection.sort_by("id").slice(0, count).combine_chunks()
    if first.num_rows:
        rows = pa.Table.from_batches(list(read_by_id(files, first.column("id").to_numpy(), ["id", "source"])))
        yield from dropped_rows(first).append_column("source", rows.column("source")).combine_chunks().to_batches()


def _single_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield from (batch.slice(row, 1) for row in range(batch.num_rows))


def _ranges(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The table of every target, sorted by id."""
    for _, of_range in groupby(rows, key=lambda row: row.column("target")[0].as_py()):
        (table,) = unpacked(of_range).values()
        yield table.sort_by("id").combine_chunks()


def _ids(table: pa.Table, name: str) -> pa.Array:
    return id_strings(table.column(name).to_numpy())
