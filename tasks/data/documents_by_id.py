"""Rows of document files by their ids, read where they are needed: the text of a document never goes through a shuffle. Runs in
executors: imports no Spark. The files are those of document_files.write_documents: sorted by id, with its range in every row group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.parcels import id_numbers

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

BATCH_ROWS = 1024


def read_by_id(paths: list[str], ids: NDArray[np.uint64], columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows with these ids (sorted), in the order of the files; `columns` must name the id. None reads all columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in paths if len(ids) else ():
        with pq.ParquetFile(path) as file:
            groups = _row_groups(file, ids)
            if groups:
                for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False):
                    numbers = id_numbers(batch.column("id"))
                    places = np.minimum(np.searchsorted(ids, numbers), len(ids) - 1)
                    is_wanted = ids[places] == numbers
                    if is_wanted.all():
                        yield batch
                    elif is_wanted.any():
                        yield batch.filter(pa.array(is_wanted))


def _row_groups(file: object, ids: NDArray[np.uint64]) -> list[int]:
    """Those whose range of ids holds a wanted one."""
    metadata = file.metadata  # pyright: ignore[reportAttributeAccessIssue]
    column = metadata.schema.to_arrow_schema().get_field_index("id")
    found = []
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(column).statistics
        low, high = (int(value, 16) for value in (statistics.min, statistics.max))
        start, stop = np.searchsorted(ids, np.array([low], np.uint64))[0], np.searchsorted(ids, np.array([high], np.uint64), "right")[0]
        if stop > start:
            found.append(group)
    return found
