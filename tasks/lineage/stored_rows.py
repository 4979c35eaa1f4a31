"""Finds rows in the Parquet files of an artifact, in a bucket too: it reads and verifies the blocks that may hold them,
and no file whole.

Files are sorted by id, so a row group tells by its least and greatest id whether it can hold one. For other columns it
reads that column of every row group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from infra.step import Manifest
from infra.storage.manifest_graph import ManifestGraph
from infra.storage.parallel import map_in_threads

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from configs.files.stored_files import StoredFile


def find_rows(
    graph: ManifestGraph,
    manifest: Manifest,
    patterns: Iterable[str],
    wanted: dict[str, Iterable[Any]],
    columns: Iterable[str],
) -> list[dict[str, Any]]:
    """Rows of the files that match one of the shell patterns, in the order of the files. `wanted` has the values that
    are looked for by column; a row has one of each. Of `columns` a row has those that its file has."""
    stored = {**manifest.content, **manifest.evidence}
    names = sorted(name for name in stored if any(fnmatchcase(name, pattern) for pattern in patterns))
    artifact = graph.open(manifest)
    look = partial(_rows_of_file, wanted=wanted, columns=tuple(columns))
    return [row for rows in map_in_threads(look, map(artifact.file, names)) for row in rows]


def _rows_of_file(file: StoredFile, wanted: dict[str, Iterable[Any]], columns: tuple[str, ...]) -> list[dict[str, Any]]:
    from tasks.data.records.stored_tables import open_parquet

    with open_parquet(file) as opened:
        known = opened.schema_arrow.names
        if not set(wanted) <= set(known):
            return []
        chosen = [name for name in columns if name in known]
        return [row for group in _groups(opened, wanted) for row in _rows_of_group(opened, group, wanted, chosen)]


def _groups(file: pq.ParquetFile, wanted: dict[str, Iterable[Any]]) -> Iterator[int]:
    """The row groups whose statistics let them hold a value of each column."""
    metadata = file.metadata
    paths = [file.schema.column(number).path for number in range(metadata.num_columns)]
    for group in range(metadata.num_row_groups):
        described = metadata.row_group(group)
        bounds = {name: described.column(paths.index(name)).statistics for name in wanted}
        if described.num_rows and all(
            bound is None or not bound.has_min_max or any(bound.min <= value <= bound.max for value in wanted[name])
            for name, bound in bounds.items()
        ):
            yield group


def _rows_of_group(
    file: pq.ParquetFile, group: int, wanted: dict[str, Iterable[Any]], columns: list[str]
) -> list[dict[str, Any]]:
    """The other columns are read only where a row matches."""
    matches = _matches(file.read_row_group(group, list(wanted), use_threads=False), wanted)
    if not matches.to_numpy().any():
        return []
    return file.read_row_group(group, columns, use_threads=False).filter(matches).to_pylist()


def _matches(table: pa.Table, wanted: dict[str, Iterable[Any]]) -> pa.ChunkedArray:
    import pyarrow as pa
    import pyarrow.compute as pc

    marks = [
        pc.is_in(table[name], pa.array(list(values), table[name].type))  # pyright: ignore[reportAttributeAccessIssue]
        for name, values in wanted.items()
    ]
    both = marks[0]
    for mark in marks[1:]:
        both = pc.and_(both, mark)  # pyright: ignore[reportAttributeAccessIssue]
    return both
