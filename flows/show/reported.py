"""The results of a run in the form that the report and Prefect's UI show."""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema import PhaseSection
from flows.running.run import AssessedModel, AssessedRewardModel
from tasks.report.report_inputs import ReportedPhase, ReportedPhases, ReportedRewardModel


def reported_phases(
    models: Sequence[AssessedModel | AssessedRewardModel], planned: Sequence[PhaseSection], unread: tuple[str, ...] = ()
) -> ReportedPhases:
    """The phases of this run, in order, and those of `planned` that it did not reach. `unread` is what none reads."""
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
                model.solutions,
                model.pairs,
            )
            for model in models
            if isinstance(model, AssessedModel)
        ),
        tuple(phase.name for phase in planned if phase.name not in reached),
        tuple(
            ReportedRewardModel(
                model.phase.name, model.checkpoint, model.decision, model.pairs, model.phase.quoted_loss
            )
            for model in models
            if isinstance(model, AssessedRewardModel)
        ),
        unread,
    )
