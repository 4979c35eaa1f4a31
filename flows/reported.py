"""A run's phases in the form that the report and Prefect's UI show."""

from __future__ import annotations

from flows.assess_checkpoint import AssessedModel
from tasks.release.report_inputs import ReportedPhase, ReportedPhases


def reported_phases(models: tuple[AssessedModel, ...]) -> ReportedPhases:
    """The phases of this run, in order."""
    return ReportedPhases(
        tuple(
            ReportedPhase(model.phase.name, model.packed, model.checkpoint, model.evaluation, model.decision, model.phase.quoted_loss)
            for model in models
        )
    )
