"""Checks the files of a table against a contract where they are read. Runs in executors: imports no Spark."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from data_contracts.runner import ContractTable, check_table
from tasks.data.records.stored_tables import open_parquet, stored_file

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    from configs.files.stored_files import StoredFile

CHECKED_COLUMNS = "num_rows long, missing array<string>, is_large boolean, findings string"
"""missing: columns that the table lacks. is_large: the columns exceed the bound, and nothing was checked. findings: of
the contract, as JSON."""


def check_parts(batches: Iterator[pa.RecordBatch], table: ContractTable, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """CHECKED_COLUMNS of all files (rows of slice_schema) of one table, which has at most `max_bytes` uncompressed."""
    import pyarrow as pa

    files = [stored_file(row) for batch in batches for row in batch.to_pylist()]
    if files:
        types = (pa.int64(), pa.list_(pa.string()), pa.bool_(), pa.string())
        row = check_files_by_pandas(files, table, max_bytes)
        yield pa.RecordBatch.from_pylist([row], schema=pa.schema(list(zip(row, types, strict=True))))


def check_files_by_pandas(files: list[StoredFile], table: ContractTable, max_bytes: int) -> dict[str, Any]:
    """One row of CHECKED_COLUMNS."""
    missing: list[str] = []
    num_rows = num_bytes = 0
    for number, file in enumerate(files):
        with open_parquet(file) as opened:
            if number == 0:
                missing = [column for column in table.columns if column not in opened.schema_arrow.names]
            num_rows += opened.metadata.num_rows
            num_bytes += _column_bytes(opened.metadata, table.columns)
    is_large = num_bytes > max_bytes
    findings = [] if missing or is_large else check_table(table, _frame(files, table))
    described = json.dumps([dataclasses.asdict(finding) for finding in findings])
    return {"num_rows": num_rows, "missing": missing, "is_large": is_large, "findings": described}


def _frame(files: list[StoredFile], table: ContractTable) -> pd.DataFrame:
    import pyarrow as pa

    parts = []
    for file in files:
        with open_parquet(file) as opened:
            parts.append(opened.read(columns=list(table.columns), use_threads=False))
    return pa.concat_tables(parts).to_pandas()


def _column_bytes(file: pq.FileMetaData, columns: tuple[str, ...]) -> int:
    groups = (file.row_group(number) for number in range(file.num_row_groups))
    chunks = (group.column(index) for group in groups for index in range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns)
