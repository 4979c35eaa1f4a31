"""Assesses a trained checkpoint: evaluation, contract, gate, registered version, and the phase's alias if accepted."""

from __future__ import annotations

from configs.schema import PhaseSection
from flows.check_contract import check_contract
from flows.find_taken_down import tag_of_taken_down
from flows.running.run import AssessedModel, Run
from flows.running.run_step import run_effect, run_step
from flows.show.track_run import finish_phase
from infra.registry.experiment_tracking import connect
from infra.registry.model_registry import ensure_alias, ensure_registered, find_version, model_name, version_tags
from infra.servers.servers import artifact_root
from infra.step import Artifact
from tasks.data.packing.pack_phase import PackedPhase
from tasks.evaluation.decide_gate import decide_gate
from tasks.evaluation.evaluate_checkpoint import Evaluation, evaluate_checkpoint
from tasks.evaluation.evaluate_pairs import PairEvaluation
from tasks.prepared_data import PreparedData
from tasks.training.state.trained_checkpoint import TrainedCheckpoint


def evaluate(
    run: Run, prepared: PreparedData, checkpoint: Artifact[TrainedCheckpoint], stage: str
) -> Artifact[Evaluation]:
    """A checkpoint's answers to the run's suite."""
    section = run.scale.evaluation
    return run_step(
        run,
        evaluate_checkpoint,
        stage=stage,
        checkpoint=checkpoint,
        suite=prepared.suite,
        recipe=section.recipe,
        resources=section.resources,
        job=section.resources,
    )


def assess_checkpoint(
    run: Run,
    prepared: PreparedData,
    phase: PhaseSection,
    checkpoint: Artifact[TrainedCheckpoint],
    packed: Artifact[PackedPhase] | None,
    start_evaluation: Artifact[Evaluation] | None,
    run_id: str,
    pairs: Artifact[PairEvaluation] | None = None,
) -> AssessedModel:
    """Judge a checkpoint by the gate of a phase, with its figures of preference pairs where it trained on some. A
    refusal is a result; the version is registered either way."""
    client, name = connect(run.mlflow), model_name(run.scale.scale)
    evaluation = evaluate(run, prepared, checkpoint, f"evaluate {phase.name}")
    check_contract(run, evaluation, "evaluation_items", stage=f"contract answers {phase.name}")
    decision = run_step(
        run,
        decide_gate,
        stage=f"gate {phase.name}",
        evaluation=evaluation,
        start_evaluation=start_evaluation,
        champion_evaluation=None,
        anchors=None,
        recipe=phase.recipe.gate,
        pairs=pairs,
    )
    finish_phase(run, phase, run_id, checkpoint, evaluation, decision)

    tags = version_tags(run.scale.scale, decision, run.store) | evaluation_tags(phase, evaluation.record)
    if find_version(client, name, checkpoint.digest) is None:
        tags |= tag_of_taken_down(run, prepared, checkpoint)
    description = f"{phase.name} at scale {run.scale.scale}"
    version, _ = run_effect(
        run,
        f"register {phase.name}",
        lambda: ensure_registered(client, name, checkpoint, "hf", run_id, artifact_root(run.home), tags, description),
        describe=lambda result: f"version {result[0]} {result[1]}",
    )
    if decision.record.accepted:
        run_effect(run, f"alias {phase.name}", lambda: ensure_alias(client, name, phase.name, version))
    reasons = decision.record.refusals
    return AssessedModel(phase, packed, checkpoint, evaluation, decision, version, run_id, reasons, pairs)


def evaluation_tags(phase: PhaseSection, evaluation: Evaluation) -> dict[str, str]:
    """Tags of a version that state its quality."""
    return {
        "glm46.phase": phase.name,
        "glm46.bits_per_byte": str(evaluation.bits_per_byte),
        "glm46.arithmetic_accuracy": str(evaluation.arithmetic_accuracy),
        "glm46.pass_at_1": str(evaluation.pass_at_1),
        "glm46.choice_accuracy": str(evaluation.choice_accuracy),
    }
