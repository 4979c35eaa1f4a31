"""Step: checks one artifact against one data contract; a violation stops the run and names rule, column and rows."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from configs.files.s3_objects import S3
from configs.files.stored_files import given_file
from data_contracts.runner import ContractTable, Finding, check_table, read_contract
from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.check_parts import CHECKED_COLUMNS, check_files_by_pandas, check_parts
from tasks.data.records.document_files import read_documents, slice_frame

if TYPE_CHECKING:
    from pathlib import Path

    from configs.schema import ContractRecipe, SparkResources


MAX_PANDAS_BYTES = 2 * 2**30
"""Uncompressed bytes of the columns that a contract reads, above which Spark validates the table: pandas takes 0.05 s
where Spark takes 4 s, but holds all in one task."""

MAX_LOCAL_BYTES = 2**26
"""Stored bytes of a table of one file that this process reads: Spark need not start for it."""


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
        table_findings, num_table_rows = check_files(subject, table, recipe.name, resources)
        num_rows += num_table_rows
        findings += table_findings
    broken = [finding for finding in findings if not finding.is_met]
    if broken:
        raise ContractViolationError(
            f"contract {recipe.name} is broken by {subject.manifest.step} ({subject.key[:12]}): "
            + "; ".join(map(_describe, broken))
        )
    rows = [dataclasses.asdict(finding) for finding in findings]
    output.path("findings.json").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    return ContractResult(contract=recipe.name, num_rows=num_rows, num_expectations=len(findings))


def check_files(
    subject: Artifact[Any],
    table: ContractTable,
    contract: str,
    resources: SparkResources,
    max_pandas_bytes: int = MAX_PANDAS_BYTES,
) -> tuple[list[Finding], int]:
    """(findings, rows) of a table. It is checked where its files are: by pandas in this process (a local master on a
    directory, or one small file) or in one task, or by Spark where the columns that the contract reads are larger than
    `max_pandas_bytes`."""
    files = subject.files(table.files)
    if files[0].name.endswith(".npy"):
        frames = (_read_array(subject.path(part.name), table.columns) for part in files)
        by_part = [(check_table(table, frame), len(frame)) for frame in frames]
        by_expectation = zip(*(own for own, _ in by_part), strict=True)
        worst = [min(own, key=lambda finding: finding.is_met) for own in by_expectation]
        return worst, sum(num_rows for _, num_rows in by_part)
    is_one_small = files[0].uri.endswith(f"/{table.files}") and files[0].size <= MAX_LOCAL_BYTES
    if resources.is_local and not files[0].uri.startswith(S3):
        checked = check_files_by_pandas(files, table, max_pandas_bytes)
    elif is_one_small:
        checked = check_files_by_pandas([given_file(subject.path(table.files))], table, max_pandas_bytes)
    else:
        checker = partial(check_parts, table=table, max_bytes=max_pandas_bytes)
        parts = slice_frame(spark_session(resources), files, 1)
        (checked,) = parts.mapInArrow(checker, CHECKED_COLUMNS).toArrow().to_pylist()
    if checked["missing"]:
        raise ContractViolationError(
            f"contract {contract} is broken by {subject.manifest.step}: {table.files} has no column "
            f"{', '.join(checked['missing'])}"
        )
    if checked["is_large"]:
        frame = read_documents(spark_session(resources), files, resources, *table.columns)
        return check_table(table, frame), checked["num_rows"]
    findings = [Finding(**{**one, "examples": tuple(one["examples"])}) for one in json.loads(checked["findings"])]
    return findings, checked["num_rows"]


def _read_array(path: Path, columns: tuple[str, ...]) -> Any:
    """A two-dimensional array, a part of a table; the contract names its columns and holds for each part."""
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
