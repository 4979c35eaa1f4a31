"""Shows the last runs of a scale: figures on the MLflow run, a page beside the report, a table in Prefect's UI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from configs.files.atomic_files import replace_durably
from flows.running.run import Run
from flows.running.run_step import run_effect
from flows.show.outcome import RunOutcome
from flows.show.track_run import SCALE_TAG
from flows.show.ui_artifacts import show_table
from infra.registry.experiment_tracking import connect, log_figures, newest_runs, set_run_tags
from tasks.report.report_inputs import ReportedPhases
from tasks.report.trend_page import (
    TrendRun,
    regressions,
    trend_page,
    trend_row_name,
    trend_rows,
    trend_run,
    without_repeats,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

PREFIX = "trend/"
LOW, HIGH = " low", " high"
MEASURED_TAG = "glm46.measured"
"""Names the computations whose figures a run shows."""
PHASE_TAG = "glm46.trend_phase"
"""The phase whose weights these figures are of."""
NUM_RUNS = 30


def show_trend(run: Run, phases: ReportedPhases, outcome: RunOutcome) -> Path:
    """Adds this run and writes the page of the last ones; the path of the page."""
    path = run.home.root / "reports" / f"{run.scale.scale}-trend.html"

    def show() -> Path:
        client = connect(run.mlflow)
        is_cached = any(stage.cached for stage in outcome.stages)
        own = trend_run("", phases, outcome.seconds, is_cached)
        runs = runs_with(client, run.scale.scale, run.pipeline_run_id, own)
        worse = regressions(runs)
        replace_durably(path, trend_page(run.scale.scale, runs).encode())
        description = "; ".join(worse) or "nothing is worse than its interval allows"
        show_table(f"{run.scale.scale}-trend", trend_rows(runs), f"The last runs: {description}. Page: {path}")
        return path

    return run_effect(run, "show trend", show)


def runs_with(client: MlflowClient, scale: str, run_id: str, own: TrendRun) -> list[TrendRun]:
    """The last runs of a scale and this one, which is kept in MLflow unless it repeats the last: quiet nights would
    push what was measured out of the last NUM_RUNS."""
    runs = read_trend(client, scale)
    if not runs or runs[-1].measured != own.measured:
        log_figures(client, run_id, _as_metrics(own))
        set_run_tags(client, run_id, {MEASURED_TAG: own.measured, PHASE_TAG: own.phase})
        runs = read_trend(client, scale)
    return without_repeats(runs)


def read_trend(client: MlflowClient, scale: str) -> list[TrendRun]:
    """The last runs of a scale that reached an evaluation, the oldest first."""
    found = []
    measured = f"tags.`{SCALE_TAG}` = '{scale}' AND tags.`{MEASURED_TAG}` != ''"
    for started, metrics, tags in newest_runs(client, measured, NUM_RUNS):
        figures = {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}
        bounded = [name.removesuffix(LOW) for name in figures if name.endswith(LOW)]
        intervals = {_shown(name): (figures[name + LOW], figures[name + HIGH]) for name in bounded}
        values = {_shown(name): value for name, value in figures.items() if not name.endswith((LOW, HIGH))}
        found.append(TrendRun(trend_row_name(started), values, intervals, tags[MEASURED_TAG], tags.get(PHASE_TAG, "")))
    return found


def _as_metrics(run: TrendRun) -> dict[str, float]:
    metrics = {PREFIX + _stored(name): value for name, value in run.figures.items()}
    for name, (low, high) in run.intervals.items():
        metrics |= {f"{PREFIX}{_stored(name)}{LOW}": low, f"{PREFIX}{_stored(name)}{HIGH}": high}
    return metrics


def _stored(name: str) -> str:
    """MLflow's names hold no @."""
    return name.replace("@", " at ")


def _shown(name: str) -> str:
    return name.replace(" at ", "@")
