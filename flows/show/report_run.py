"""Ends a run that trained with its report, wherever it ended.

The run may have been promoted, refused by a gate, or ended before the release.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.load import load_prices
from flows.running.run import ReleasedModel, Run
from flows.running.run_step import run_effect, run_step
from infra.registry.model_registry import model_name
from tasks.data.filtering.blocked_documents import read_block_list
from tasks.prepared_data import PreparedData
from tasks.report.report_inputs import NamedRelease, ReportedPhases
from tasks.report.write_report import publish_report, write_report


@dataclass(frozen=True)
class PublishedReport:
    """Where a person finds the report, and the files that go to MLflow: report and cards."""

    path: Path
    files: tuple[Path, ...]


def _named(run: Run, phases: ReportedPhases, released: ReleasedModel) -> NamedRelease:
    replaced = released.rivals.replaced_by(phases.last.checkpoint)
    return NamedRelease(model=model_name(run.scale.scale), version=released.version, replaced=replaced)


def report_run(
    run: Run, prepared: PreparedData, phases: ReportedPhases, released: ReleasedModel | None
) -> PublishedReport:
    """Write and publish the report of what this run reached; `released` is None where it ended before the release."""
    suite = None if released is None else released.suite
    report = run_step(
        run,
        write_report,
        data=prepared,
        blocked=read_block_list(run.home.root, run.scale.data.recipe.filter.block_list),
        phases=phases,
        gguf_evaluation=None if released is None else released.gguf_evaluation,
        quantized=None if released is None else released.quantized_evaluations,
        quantization_decision=None if released is None else released.quantization_decision,
        contamination_decision=None if released is None else released.contamination_decision,
        decision=None if released is None else released.decision,
        suite_evaluation=None if suite is None else suite.evaluation,
        suite_decision=None if suite is None else suite.decision,
        promotion=None if released is None else released.promotion,
        released=None if released is None else _named(run, phases, released),
        recipe=load_prices("guide"),
    )
    path = run_effect(
        run, "publish report", lambda: publish_report(report, run.home.root / "reports" / f"{run.scale.scale}.html")
    )
    return PublishedReport(path, tuple(report.paths("*")))
