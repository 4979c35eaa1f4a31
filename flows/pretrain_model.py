"""Pre-training: every phase packs its rows, trains, is evaluated, judged, registered; an accepted one gets the alias of its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from prefect import flow

from configs.schema import PhaseSection
from flows.check_contract import check_contract
from flows.prepare_data import PreparedData
from flows.run_step import Run, run_effect, run_step
from infra.experiment_tracking import connect, ensure_run, finish_run, log_metrics
from infra.model_registry import ensure_alias, ensure_registered, model_name, version_tags
from infra.servers import artifact_root
from infra.step import Artifact
from tasks.data.pack_phase import pack_phase
from tasks.evaluation.decide_gate import GateDecision, decide_gate
from tasks.evaluation.evaluate_checkpoint import Evaluation, evaluate_checkpoint
from tasks.training.train_phase import TrainedCheckpoint, train_phase


@dataclass(frozen=True)
class TrainedModel:
    """The last phase's checkpoint and what was found out about it; `reasons` is empty unless a gate refused."""

    checkpoint: Artifact[TrainedCheckpoint] | None
    evaluation: Artifact[Evaluation] | None = None
    decision: Artifact[GateDecision] | None = None
    version: str = ""
    run_id: str = ""
    reasons: tuple[str, ...] = field(default=())


@flow(name="pretrain_model", validate_parameters=False)
def pretrain_model(
    run: Run, prepared: PreparedData, phases: tuple[PhaseSection, ...], start: Artifact[TrainedCheckpoint] | None
) -> TrainedModel:
    """Train the phases one after the other; a refused gate ends the run with its reasons."""
    trained = TrainedModel(start)
    for phase in phases:
        trained = _train(run, prepared, phase, trained.checkpoint)
        if trained.reasons:
            break
    return trained


def _train(run: Run, prepared: PreparedData, phase: PhaseSection, start: Artifact[TrainedCheckpoint] | None) -> TrainedModel:
    scale = run.scale
    packed = run_step(run, pack_phase, stage=f"pack {phase.name}", shards=prepared.shards, recipe=phase.recipe.packing)
    check_contract(run, packed, "packed")

    client = connect(run.mlflow)
    name = model_name(scale.scale)
    tags = {"glm46.scale": scale.scale, "glm46.phase": phase.name}
    run_id = run_effect(
        run, f"track {phase.name}", lambda: ensure_run(client, name, phase.name, packed.digest, None, tags),
        describe=lambda run_id: f"MLflow run {run_id[:8]}",
    )  # fmt: skip
    checkpoint = run_step(
        run, train_phase, stage=f"train {phase.name}", log_metrics=partial(log_metrics, client, run_id), packed=packed,
        shards=prepared.shards, tokenizer=prepared.tokenizer, start=start, recipe=scale.training_recipe(phase), resources=phase.resources,
    )  # fmt: skip
    evaluation = run_step(
        run, evaluate_checkpoint, stage=f"evaluate {phase.name}", checkpoint=checkpoint, suite=prepared.suite,
        recipe=scale.evaluation.recipe, resources=scale.evaluation.resources,
    )  # fmt: skip
    check_contract(run, evaluation, "evaluation_items")
    decision = run_step(
        run, decide_gate, stage=f"gate {phase.name}", evaluation=evaluation, champion_evaluation=None, recipe=phase.recipe.gate
    )
    finish_run(client, run_id, succeeded=decision.record.accepted)

    found = _version_tags(run, phase, evaluation, decision)
    description = f"{phase.name} at scale {scale.scale}"
    version, _ = run_effect(
        run, f"register {phase.name}",
        lambda: ensure_registered(client, name, checkpoint, "hf", run_id, artifact_root(run.home), found, description),
        describe=lambda result: f"version {result[0]} {result[1]}",
    )  # fmt: skip
    if not decision.record.accepted:
        refused = tuple(reason for reason in decision.record.reasons if reason.startswith("refused"))
        return TrainedModel(checkpoint, evaluation, decision, version, run_id, refused)
    run_effect(run, f"alias {phase.name}", lambda: ensure_alias(client, name, phase.name, version))
    return TrainedModel(checkpoint, evaluation, decision, version, run_id)


def _version_tags(run: Run, phase: PhaseSection, evaluation: Artifact[Evaluation], decision: Artifact[GateDecision]) -> dict[str, str]:
    return version_tags(run.scale.scale, decision, run.store) | {
        "glm46.phase": phase.name,
        "glm46.bits_per_byte": str(evaluation.record.bits_per_byte),
        "glm46.arithmetic_accuracy": str(evaluation.record.arithmetic_accuracy),
    }
