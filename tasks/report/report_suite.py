"""The report about a release's answers to the suite of its scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Artifact
from tasks.evaluation.benchmarks.evaluate_suite import SUITE_FILE
from tasks.report.published_figures import quoted_of
from tasks.report.report_page import heading, table, with_note

if TYPE_CHECKING:
    from tasks.evaluation.benchmarks.evaluate_suite import SuiteEvaluation
    from tasks.evaluation.intervals import Interval


COLUMNS = ("benchmark", "figure", "value", "items")
QUOTED = "of other models, as their makers state it: not measured here"
"""Name of the column beside the measured ones."""


def suite_table(evaluation: Artifact[SuiteEvaluation] | None) -> str:
    """Every figure with its interval, those of parts included; empty where the release was asked no suite."""
    if evaluation is None:
        return ""
    from tasks.evaluation.benchmarks.suite_results import SuiteResult

    result = SuiteResult.model_validate_json(evaluation.path(SUITE_FILE).read_bytes())
    has_quoted = any(quoted_of(each.name) for each in result.benchmarks)
    rows = [
        (
            each.name,
            figure.part or figure.name,
            with_note(f"{figure.value:.4f}", _written(figure.interval)),
            f"{figure.num_items:,}",
            *(["" if figure.part else quoted_of(each.name)] if has_quoted else []),
        )
        for each in result.benchmarks
        for figure in each.figures
    ]
    return heading("Suite of benchmarks") + table((*COLUMNS, QUOTED) if has_quoted else COLUMNS, rows)


def _written(interval: Interval | None) -> str:
    return "" if interval is None else f"[{interval[0]:.4f}, {interval[1]:.4f}]"
