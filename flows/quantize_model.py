"""Writes a release in every format of its scale, and measures what each quantized checkpoint lost."""

from __future__ import annotations

from typing import Any

from configs.schema import CALIBRATED_GGUF_TYPES
from flows.running.run import QuantizedModel, Run
from flows.running.run_step import run_step
from infra.step import Artifact
from tasks.data.packing.pack_phase import pack_phase
from tasks.prepared_data import PreparedData
from tasks.release.convert_to_gguf import GgufFiles, convert_to_gguf
from tasks.release.evaluate_quantized import evaluate_quantized
from tasks.release.measure_importance import measure_importance
from tasks.release.quantize_checkpoint import quantize_checkpoint
from tasks.training.state.trained_checkpoint import TrainedCheckpoint


def quantize_model(
    run: Run, prepared: PreparedData, checkpoint: Artifact[TrainedCheckpoint]
) -> dict[str, QuantizedModel]:
    """Every format of `release.recipe.quantized_formats`, by its name."""
    recipe, job = run.scale.release.recipe, run.scale.release.resources
    models = {}
    for name in recipe.quantized_formats:
        own = recipe.quantization_recipe(name)
        texts = calibration_texts(run, prepared) if own.calibration_rows else NO_TEXTS
        quantized = run_step(
            run,
            quantize_checkpoint,
            stage=f"quantize {name}",
            checkpoint=checkpoint,
            recipe=own,
            resources=job,
            job=job,
            **texts,
        )
        evaluation = run_step(
            run,
            evaluate_quantized,
            stage=f"evaluate {name}",
            quantized=quantized,
            checkpoint=checkpoint,
            suite=prepared.suite,
            recipe=recipe,
            resources=job,
            job=job,
        )
        models[name] = QuantizedModel(quantized, evaluation)
    return models


def write_gguf_files(run: Run, prepared: PreparedData, checkpoint: Artifact[TrainedCheckpoint]) -> Artifact[GgufFiles]:
    """Every type of `release.recipe.gguf_types`, weighed by the importance matrix where one of them is calibrated."""
    recipe, job = run.scale.release.recipe, run.scale.release.resources
    importance = None
    if any(name in CALIBRATED_GGUF_TYPES for name in recipe.gguf_types):
        importance = run_step(
            run,
            measure_importance,
            checkpoint=checkpoint,
            recipe=recipe.calibration_recipe(),
            resources=job,
            job=job,
            **calibration_texts(run, prepared),
        )
    return run_step(run, convert_to_gguf, checkpoint=checkpoint, importance=importance, recipe=recipe, job=job)


NO_TEXTS: dict[str, Any] = {"packed": None, "shards": None, "chats": None}


def calibration_texts(run: Run, prepared: PreparedData) -> dict[str, Any]:
    """The first rows that the scale's last phase with rows would read, if it began there."""
    phase, num_rows = run.scale.calibration_phase, run.scale.release.recipe.calibration_rows
    assert phase is not None, "choose_stages refused formats without rows"
    recipe = phase.recipe.packing_recipe.model_copy(
        update={"num_tokens": num_rows * phase.recipe.sequence_length, "fim_rate": 0.0}
    )
    chats = prepared.chat_shards if phase.recipe.reads_chats else None
    packed = run_step(
        run,
        pack_phase,
        stage="pack calibration",
        shards=prepared.shards,
        chats=chats,
        previous=None,
        tokenizer=None,
        recipe=recipe,
    )
    return {"packed": packed, "shards": prepared.shards, "chats": chats}
