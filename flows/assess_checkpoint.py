"""What follows every training: evaluation, contract, gate, registered version, and the phase's alias for an accepted one."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import PhaseSection
from flows.check_contract import check_contract
from flows.prepare_data import PreparedData
from flows.run_step import Run, run_effect, run_step
from infra.experiment_tracking import connect, ensure_run, finish_run
from infra.model_registry import ensure_alias, ensure_registered, model_name, version_tags
from infra.servers import artifact_root
from infra.step import Artifact
from tasks.evaluation.decide_gate import GateDecision, decide_gate
from tasks.evaluation.evaluate_checkpoint import Evaluation, evaluate_checkpoint
from tasks.training.train_phase import TrainedCheckpoint


@dataclass(frozen=True)
class AssessedModel:
    """A checkpoint and what was found out about it; `reasons` is empty unless the gate refused."""

    checkpoint: Artifact[TrainedCheckpoint]
    evaluation: Artifact[Evaluation]
    decision: Artifact[GateDecision]
    version: str
    run_id: str
    reasons: tuple[str, ...]


def track_phase(run: Run, phase: PhaseSection, key: str) -> str:
    """Id of the MLflow run of a phase's work, found again by the step key of that work."""
    client, name = connect(run.mlflow), model_name(run.scale.scale)
    tags = {"glm46.scale": run.scale.scale, "glm46.phase": phase.name}
    return run_effect(
        run, f"track {phase.name}", lambda: ensure_run(client, name, phase.name, key, None, tags),
        describe=lambda run_id: f"MLflow run {run_id[:8]}",
    )  # fmt: skip


def assess_checkpoint(
    run: Run, prepared: PreparedData, phase: PhaseSection, checkpoint: Artifact[TrainedCheckpoint], run_id: str
) -> AssessedModel:
    """Judge a checkpoint by the gate of a phase. A refusal is a result; the version is registered either way."""
    client, name = connect(run.mlflow), model_name(run.scale.scale)
    evaluation = run_step(
        run, evaluate_checkpoint, stage=f"evaluate {phase.name}", checkpoint=checkpoint, suite=prepared.suite,
        recipe=run.scale.evaluation.recipe, resources=run.scale.evaluation.resources,
    )  # fmt: skip
    check_contract(run, evaluation, "evaluation_items")
    gate = phase.recipe.gate
    decision = run_step(run, decide_gate, stage=f"gate {phase.name}", evaluation=evaluation, champion_evaluation=None, recipe=gate)
    finish_run(client, run_id, succeeded=decision.record.accepted)

    tags = version_tags(run.scale.scale, decision, run.store) | {
        "glm46.phase": phase.name,
        "glm46.bits_per_byte": str(evaluation.record.bits_per_byte),
        "glm46.arithmetic_accuracy": str(evaluation.record.arithmetic_accuracy),
    }
    description = f"{phase.name} at scale {run.scale.scale}"
    version, _ = run_effect(
        run, f"register {phase.name}",
        lambda: ensure_registered(client, name, checkpoint, "hf", run_id, artifact_root(run.home), tags, description),
        describe=lambda result: f"version {result[0]} {result[1]}",
    )  # fmt: skip
    if decision.record.accepted:
        run_effect(run, f"alias {phase.name}", lambda: ensure_alias(client, name, phase.name, version))
    refused = tuple(reason for reason in decision.record.reasons if reason.startswith("refused"))
    return AssessedModel(checkpoint, evaluation, decision, version, run_id, refused)
