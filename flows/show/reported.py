"""The results of a run in the form that the report and Prefect's UI show."""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema import PhaseSection
from flows.running.run import AssessedModel
from tasks.report.report_inputs import ReportedPhase, ReportedPhases


def reported_phases(models: Sequence[AssessedModel], planned: Sequence[PhaseSection]) -> ReportedPhases:
    """The phases of this run, in order, and those of `planned` that it did not reach."""
    reached = {model.phase.name for model in models}
    return ReportedPhases(
        tuple(
            ReportedPhase(
                model.phase.name,
                model.packed,
                model.checkpoint,
                model.evaluation,
                model.decision,
                model.phase.quoted_loss,
            )
            for model in models
        ),
        tuple(phase.name for phase in planned if phase.name not in reached),
    )
