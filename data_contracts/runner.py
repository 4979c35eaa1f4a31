"""Runs one data contract with Great Expectations: a YAML of expectations over the tables of an artifact.

tables:
  - files: documents/*.parquet      # which files of the artifact
    columns: [id, domain]           # what is read of them; the first one names a row in messages
    nullable: [domain]              # those that may have no value (Great Expectations' own rules pass over NULL)
    expectations:                   # names and arguments of Great Expectations' own expectations
      - {type: expect_column_values_to_be_unique, column: id}
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

_CONTEXT_LOCK = threading.Lock()
"""Great Expectations keeps the context in use in a variable of the process, and threads check contracts."""
CONTRACTS_DIR = Path(__file__).resolve().parent
NUM_EXAMPLES = 5


@dataclass(frozen=True)
class ContractTable:
    """One table that a contract describes."""

    files: str
    columns: tuple[str, ...]
    expectations: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Finding:
    """One expectation, held or broken."""

    table: str
    expectation: str
    arguments: dict[str, Any]
    is_met: bool
    observed: str
    """The observed value, or how many rows broke the rule."""
    examples: tuple[str, ...]
    """The first rows that broke it."""


def read_contract(name: str) -> tuple[ContractTable, ...]:
    """The tables of data_contracts/<name>.yaml. Raises ValueError for a missing file or an unknown key."""
    path = CONTRACTS_DIR / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(
            f"no contract {path.name}: the contracts are "
            f"{', '.join(sorted(file.stem for file in CONTRACTS_DIR.glob('*.yaml')))}"
        )
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        return tuple(
            ContractTable(table["files"], tuple(table["columns"]), (*_filled(table), *table["expectations"]))
            for table in tree["tables"]
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path.name}: a contract has `tables`, each with files, columns and expectations; {error} is wrong"
        ) from error


def _filled(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The expectations that every column has its value, but for the `nullable` ones."""
    columns = [column for column in table["columns"] if column not in table.get("nullable", ())]
    return [{"type": "expect_column_values_to_not_be_null", "column": column} for column in columns]


def check_table(table: ContractTable, frame: pd.DataFrame | DataFrame) -> list[Finding]:
    """Validate a pandas or Spark frame with an ephemeral Great Expectations context that sends nothing anywhere; both
    give the same result."""
    with _CONTEXT_LOCK:
        results = _validate(table, frame)
    findings = [_finding(table, result) for result in results]
    return sorted(findings, key=lambda finding: (finding.expectation, str(sorted(finding.arguments.items(), key=str))))


def _validate(table: ContractTable, frame: pd.DataFrame | DataFrame) -> list[Any]:
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    logging.getLogger("great_expectations").setLevel(logging.ERROR)
    import great_expectations as gx
    import pandas as pd
    from great_expectations.expectations import core

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}  # pyright: ignore[reportAttributeAccessIssue]
    suite = gx.ExpectationSuite(name=table.files)
    for arguments in table.expectations:
        suite.add_expectation(_expectation(core, arguments))
    sources = context.data_sources
    source = sources.add_pandas("contract") if isinstance(frame, pd.DataFrame) else sources.add_spark("contract")
    batch = source.add_dataframe_asset("table").add_batch_definition_whole_dataframe("whole")
    definition = gx.ValidationDefinition(name=table.files, data=batch, suite=context.suites.add(suite))
    context.validation_definitions.add(definition)
    checkpoint = context.checkpoints.add(
        gx.Checkpoint(
            name=table.files,
            validation_definitions=[definition],
            result_format={
                "result_format": "SUMMARY",
                "partial_unexpected_count": NUM_EXAMPLES,
                "unexpected_index_column_names": [table.columns[0]],
            },
        )
    )
    (results,) = checkpoint.run(batch_parameters={"dataframe": frame}).run_results.values()
    return results.results


def _expectation(core: Any, arguments: dict[str, Any]) -> Any:
    given = dict(arguments)
    kind = given.pop("type")
    name = "".join(part.capitalize() for part in kind.split("_"))
    if not hasattr(core, name):
        raise ValueError(f"Great Expectations has no expectation {kind}: correct its spelling in the contract")
    return getattr(core, name)(**given)


def _finding(table: ContractTable, result: Any) -> Finding:
    arguments = {name: value for name, value in result.expectation_config.kwargs.items() if name != "batch_id"}
    details = result.result
    if result.exception_info and result.exception_info.get("raised_exception"):
        raise ValueError(
            f"{result.expectation_config.type} on {table.files} could not be computed: "
            f"{result.exception_info['exception_message']}"
        )
    counts_rows = "element_count" in details and "unexpected_count" in details
    observed = (
        f"{details['unexpected_count']} of {details['element_count']} rows"
        if counts_rows
        else str(details.get("observed_value"))
    )
    rows = details.get("partial_unexpected_index_list") or details.get("partial_unexpected_list") or []
    examples = tuple(_example(row) for row in rows[:NUM_EXAMPLES])
    return Finding(table.files, result.expectation_config.type, arguments, bool(result.success), observed, examples)


def _example(row: Any) -> str:
    values = sorted(row.items()) if isinstance(row, dict) else [("value", row)]
    return " ".join(f"{name}={str(value)[:60]!r}" for name, value in values)
