"""Pre-training: every phase packs its rows, trains and is assessed; a refused gate ends the run with its reasons."""

from __future__ import annotations

from functools import partial

from prefect import flow

from configs.schema import PhaseSection
from flows.assess_checkpoint import AssessedModel, assess_checkpoint, track_phase
from flows.check_contract import check_contract
from flows.prepare_data import PreparedData
from flows.run_step import Run, run_step
from infra.experiment_tracking import connect, log_metrics
from infra.step import Artifact
from infra.store import step_key
from tasks.data.pack_phase import pack_phase
from tasks.training.train_phase import TrainedCheckpoint, train_phase


@flow(name="pretrain_model", flow_run_name="pretrain_model", validate_parameters=False)
def pretrain_model(
    run: Run, prepared: PreparedData, phases: tuple[PhaseSection, ...], start: Artifact[TrainedCheckpoint] | None
) -> AssessedModel | None:
    """The last phase's model, or the first one that its gate refused; None where there is no phase."""
    assessed = None
    for phase in phases:
        assessed = _train(run, prepared, phase, start if assessed is None else assessed.checkpoint)
        if assessed.reasons:
            break
    return assessed


def _train(run: Run, prepared: PreparedData, phase: PhaseSection, start: Artifact[TrainedCheckpoint] | None) -> AssessedModel:
    packed = run_step(run, pack_phase, stage=f"pack {phase.name}", shards=prepared.shards, recipe=phase.recipe.packing_recipe)
    check_contract(run, packed, "packed")
    recipe = run.scale.training_recipe(phase)
    inputs = {"packed": packed, "shards": prepared.shards, "tokenizer": prepared.tokenizer, "start": start}
    run_id = track_phase(run, phase, step_key(train_phase.identity(recipe, inputs)))
    checkpoint = run_step(
        run, train_phase, stage=f"train {phase.name}", recipe=recipe, resources=phase.resources,
        log_metrics=partial(log_metrics, connect(run.mlflow), run_id), **inputs,
    )  # fmt: skip
    return assess_checkpoint(run, prepared, phase, checkpoint, run_id)
