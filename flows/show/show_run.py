"""Shows a run in Prefect's UI: the data funnel, each phase's curve and figures, the load of the experts, answers before
and after, the bounds of a release, the verdict with its reasons, and links."""

from __future__ import annotations

from flows.running.run import AssessedModel, AssessedRewardModel, ReleasedModel, Run
from flows.show.outcome import RunOutcome
from flows.show.ui_artifacts import show_link, show_picture, show_table
from infra.registry.experiment_tracking import connect, run_page
from infra.servers.recorded_servers import lasting_mlflow
from tasks.evaluation.decide_gate import GateDecision
from tasks.prepared_data import PreparedData
from tasks.report.phase_chart import phase_chart
from tasks.report.report_data import funnel_rows
from tasks.report.report_evaluation import BOUND_COLUMNS, bound_row, figure_rows
from tasks.report.report_inputs import ReportedPhases
from tasks.report.report_summary import answer_columns, answer_rows
from tasks.report.run_pictures import funnel_chart, load_chart


def show_data(run: Run, prepared: PreparedData) -> None:
    """Documents in, dropped by reason, out: as a table, and as a picture where documents were read."""
    rows = [{"stage": stage, "what": what, "number": number} for stage, what, number in funnel_rows(prepared)]
    show_table(f"{run.scale.scale} data", rows, "documents in, dropped by reason, and out")
    if prepared.documents is not None:
        show_picture(
            f"{run.scale.scale} funnel", funnel_chart(prepared, prepared.documents), "documents after each stage"
        )


def show_phase(run: Run, model: AssessedModel | AssessedRewardModel) -> None:
    """The phase's curve and its gate's verdict."""
    chart = phase_chart(model.checkpoint)
    if chart is not None:
        show_picture(f"{run.scale.scale} {model.phase.name} curve", chart, f"training of {model.phase.name}")
    rows = _bound_rows(model.decision.record)
    show_table(f"{run.scale.scale} {model.phase.name} gate", rows, f"gate of {model.phase.name}")
    show_link(f"{run.scale.scale} {model.phase.name} run", _page(run, model.run_id), f"{model.phase.name} in MLflow")


def show_release(run: Run, released: ReleasedModel) -> None:
    """Every bound of the release's gates with its verdict."""
    decisions = {
        "comparison": released.decision,
        **({} if released.suite is None else {"suite": released.suite.decision}),
        "quantization": released.quantization_decision,
        "contamination": released.contamination_decision,
    }
    rows = [{"gate": gate} | row for gate, decision in decisions.items() for row in _bound_rows(decision.record)]
    show_table(f"{run.scale.scale} release gates", rows, f"gates of the release, version {released.version}")


def show_phases(run: Run, prepared: PreparedData, phases: ReportedPhases) -> None:
    """The load of the experts over all phases, and the answers to the same questions before and after."""
    chart = load_chart(phases)
    if chart is not None:
        show_picture(f"{run.scale.scale} expert load", chart, "busiest expert over the mean, by layer: pale is balance")
    columns = answer_columns(phases.path)
    answers = [
        dict(zip(columns, (question, *(f"{said} ({right})" for said, right in given)), strict=True))
        for question, given in answer_rows(prepared.suite, phases.path)
    ]
    if answers:
        show_table(f"{run.scale.scale} answers", answers, "the same questions, before and after")


def show_outcome(run: Run, phases: ReportedPhases, outcome: RunOutcome) -> None:
    """The verdict with every reason, the table of figures over phases, that of stages, and the links to MLflow and the
    report."""
    verdict = "refused" if outcome.reasons else "accepted" if outcome.promoted else "ended before its release"
    rows = [{"verdict": verdict, "reason": reason} for reason in outcome.reasons or ("",)]
    show_table(f"{run.scale.scale} verdict", rows, f"{outcome.model} version {outcome.version or '-'}: {verdict}")
    page = _page(run, run.pipeline_run_id)
    show_link(f"{run.scale.scale} mlflow", page, "this run in MLflow")
    if phases.phases:
        columns = ("figure", *(phase.name for phase in phases))
        rows = [dict(zip(columns, row, strict=True)) for row in figure_rows(phases)]
        show_table(f"{run.scale.scale} figures", rows, "what each phase achieved, with 95 % intervals")
    if outcome.report:
        show_link(f"{run.scale.scale} report", f"{page}/artifacts/evidence/report.html", "the report")
    rows = [
        {
            "stage": stage.name,
            "seconds": stage.seconds,
            "state": "cached" if stage.cached else stage.reason,
            "figures": stage.figures,
        }
        for stage in outcome.stages
    ]
    show_table(f"{run.scale.scale} stages", rows, "every stage with its time, and why it ran")


def _page(run: Run, run_id: str) -> str:
    """URL of an MLflow run where it is found after the pipeline's run, too."""
    return run_page(connect(run.mlflow), lasting_mlflow(run.home, run.mlflow), run_id)


def _bound_rows(decision: GateDecision) -> list[dict[str, str]]:
    return [
        {"verdict": bound.outcome} | dict(zip(BOUND_COLUMNS, bound_row(bound), strict=True))
        for bound in decision.bounds
    ]
