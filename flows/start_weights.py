"""Loads the weights that a run starts from: a committed checkpoint by key, a Hugging Face directory, or an alias."""

from __future__ import annotations

from pathlib import Path

from flows.check_start import is_key, version_of_alias
from flows.running.run import Run
from flows.running.run_step import run_step
from infra.registry.experiment_tracking import connect
from infra.step import Artifact
from tasks.prepared_data import PreparedData
from tasks.training.import_checkpoint import describe_checkpoint_dir, import_checkpoint
from tasks.training.state.trained_checkpoint import TrainedCheckpoint


def find_start(run: Run, start: str, prepared: PreparedData) -> Artifact[TrainedCheckpoint]:
    """The checkpoint that `start` names, resolved once. Raises ValueError where there is none."""
    if Path(start).is_dir():
        source = describe_checkpoint_dir(Path(start))
        return run_step(
            run, import_checkpoint, source=source, tokenizer=prepared.tokenizer, recipe=run.scale.model.recipe
        )
    key = start if is_key(start) else version_of_alias(connect(run.mlflow), run.scale, start).key
    return run.store.load(key, TrainedCheckpoint)
