"""Loads the weights that a run starts from: a committed checkpoint by key, a Hugging Face directory, or an alias."""

from __future__ import annotations

from pathlib import Path

from configs.schema import ModelRecipe, OwnModelRecipe, PhaseSection
from flows.check_start import is_key, refuse_taken_down, version_of_alias
from flows.running.run import Run
from flows.running.run_step import run_step
from infra.registry.experiment_tracking import connect
from infra.registry.model_registry import find_version, model_name
from infra.step import Artifact
from tasks.prepared_data import PreparedData
from tasks.training.import_checkpoint import describe_checkpoint_dir, import_checkpoint
from tasks.training.state.trained_checkpoint import TrainedCheckpoint


def find_start(run: Run, start: str, prepared: PreparedData) -> Artifact[TrainedCheckpoint]:
    """The checkpoint that `start` names, resolved once. Raises ValueError where there is none, or it may not be trained
    on."""
    if Path(start).is_dir():
        return _import(run, "import_checkpoint", Path(start), prepared, run.scale.model.recipe)
    client = connect(run.mlflow)
    key = start if is_key(start) else version_of_alias(client, run.scale, start).key
    checkpoint = run.store.load(key, TrainedCheckpoint)
    refuse_taken_down(start, find_version(client, model_name(run.scale.scale), checkpoint.digest))
    return checkpoint


def import_own_model(
    run: Run, phase: PhaseSection, prepared: PreparedData, own: OwnModelRecipe
) -> Artifact[TrainedCheckpoint]:
    """The weights that a reward model of its own size starts from."""
    return _import(run, f"import {phase.name}", Path(own.checkpoint_dir), prepared, own.architecture)


def _import(
    run: Run, stage: str, path: Path, prepared: PreparedData, recipe: ModelRecipe
) -> Artifact[TrainedCheckpoint]:
    source = describe_checkpoint_dir(path)
    return run_step(run, import_checkpoint, stage=stage, source=source, tokenizer=prepared.tokenizer, recipe=recipe)
