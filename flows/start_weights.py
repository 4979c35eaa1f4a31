"""Finds the weights a run is entered with: a committed checkpoint by key, a Hugging Face directory, or the version an alias names."""

from __future__ import annotations

from pathlib import Path

from flows.run_step import Run, run_step
from infra.experiment_tracking import connect
from infra.model_registry import model_name, resolve_alias
from infra.step import Artifact
from tasks.data.prepared_data import PreparedData
from tasks.training.import_checkpoint import describe_checkpoint_dir, import_checkpoint
from tasks.training.train_phase import TrainedCheckpoint


def find_start(run: Run, start: str, prepared: PreparedData) -> Artifact[TrainedCheckpoint]:
    """The checkpoint that `start` names, resolved once. Raises ValueError where there is none."""
    if Path(start).is_dir():
        source = describe_checkpoint_dir(Path(start))
        return run_step(
            run, import_checkpoint, source=source, tokenizer=prepared.tokenizer, recipe=run.scale.model.recipe
        )  # fmt: skip
    if len(start) == 64 and all(character in "0123456789abcdef" for character in start):
        return run.store.load(start, TrainedCheckpoint)
    version = resolve_alias(connect(run.mlflow), model_name(run.scale.scale), start)
    if version is None:
        raise ValueError(
            f"--start {start}: no directory of that name, no 64-digit checkpoint key, and no alias of model {model_name(run.scale.scale)}"
        )
    return run.store.load(version.key, TrainedCheckpoint)
