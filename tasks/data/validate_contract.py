"""Step: checks one artifact against one data contract; a violation stops the run and names rule, column and rows."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from data_contracts.runner import ContractTable, Finding, check_table, read_contract
from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step

if TYPE_CHECKING:
    from pathlib import Path

    from pyarrow.parquet import FileMetaData

    from configs.schema import ContractRecipe, SparkResources


MAX_PANDAS_BYTES = 2 * 2**30
"""Uncompressed bytes of the columns that a contract reads, above which Spark validates the table: pandas takes 0.05 s
where Spark takes 4 s, but holds all in this process."""


class ContractViolationError(ValueError):
    """Data that breaks its contract."""


class ContractResult(Record):
    contract: str
    num_rows: int
    num_expectations: int


@step(content=("findings.json",), distributions=("great_expectations", "pandas"))
def validate_contract(
    *, subject: Artifact[Any], recipe: ContractRecipe, resources: SparkResources, output: Output
) -> ContractResult:
    """Check a contract, and write each expectation with its measured value to findings.json. Raises
    ContractViolationError."""
    tables = read_contract(recipe.name)
    findings: list[Finding] = []
    num_rows = 0
    for number, table in enumerate(tables):
        output.report(Progress(number, len(tables), "tables", table.files))
        frame, num_table_rows = read_table(subject, table, recipe.name, resources)
        num_rows += num_table_rows
        findings += check_table(table, frame)
    broken = [finding for finding in findings if not finding.is_met]
    if broken:
        raise ContractViolationError(
            f"contract {recipe.name} is broken by {subject.manifest.step} ({subject.key[:12]}): "
            + "; ".join(map(_describe, broken))
        )
    rows = [dataclasses.asdict(finding) for finding in findings]
    output.path("findings.json").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    return ContractResult(contract=recipe.name, num_rows=num_rows, num_expectations=len(findings))


def read_table(
    subject: Artifact[Any],
    table: ContractTable,
    contract: str,
    resources: SparkResources,
    max_pandas_bytes: int = MAX_PANDAS_BYTES,
) -> tuple[Any, int]:
    """(frame, rows) of the columns that a contract names: in pandas, or in Spark where they are larger than
    `max_pandas_bytes`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = subject.paths(table.files)
    if paths[0].suffix == ".npy":
        frame = _read_array(paths[0], table.columns)
        return frame, len(frame)
    missing = [column for column in table.columns if column not in pq.read_schema(paths[0]).names]
    if missing:
        raise ContractViolationError(
            f"contract {contract} is broken by {subject.manifest.step}: {table.files} has no column "
            f"{', '.join(missing)}"
        )
    files = [pq.read_metadata(path) for path in paths]
    num_rows = sum(file.num_rows for file in files)
    if sum(_column_bytes(file, table.columns) for file in files) > max_pandas_bytes:
        spark = spark_session(resources)
        return spark.read.parquet(*(path.as_uri() for path in paths)).select(*table.columns), num_rows
    return pa.concat_tables([pq.read_table(path, columns=list(table.columns)) for path in paths]).to_pandas(), num_rows


def _column_bytes(file: FileMetaData, columns: tuple[str, ...]) -> int:
    groups = (file.row_group(number) for number in range(file.num_row_groups))
    chunks = (group.column(index) for group in groups for index in range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns)


def _read_array(path: Path, columns: tuple[str, ...]) -> Any:
    """A two-dimensional array as a table; the contract names its columns."""
    import numpy as np
    import pandas as pd

    return pd.DataFrame(dict(zip(columns, np.load(path, allow_pickle=False).T, strict=True)))


def _describe(finding: Finding) -> str:
    column = finding.arguments.get("column", "the table")
    arguments = ", ".join(f"{name} {value}" for name, value in sorted(finding.arguments.items()) if name != "column")
    examples = f", for example {', '.join(finding.examples)}" if finding.examples else ""
    return (
        f"{column} in {finding.table}: {finding.expectation}{f' ({arguments})' if arguments else ''} found "
        f"{finding.observed}{examples}"
    )
