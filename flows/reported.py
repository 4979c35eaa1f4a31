"""A run's artifacts in the form that the report and Prefect's UI show."""

from __future__ import annotations

from flows.assess_checkpoint import AssessedModel
from flows.prepare_data import PreparedData
from tasks.release.report_inputs import ReportedData, ReportedPhase, ReportedPhases


def reported_data(prepared: PreparedData) -> ReportedData:
    """The data's artifacts as the report takes them."""
    return ReportedData(
        prepared.ingested, prepared.deduplicated, prepared.split, prepared.filtered, prepared.problems, prepared.decontaminated,
        prepared.chats, prepared.tokenizer, prepared.shards, prepared.chat_shards, prepared.suite,
        tuple(result for _, result in prepared.contracts.values()),
    )  # fmt: skip


def reported_phases(models: tuple[AssessedModel, ...]) -> ReportedPhases:
    """The phases of this run as the report takes them."""
    return ReportedPhases(
        tuple(ReportedPhase(model.phase.name, model.packed, model.checkpoint, model.evaluation, model.decision) for model in models)
    )
