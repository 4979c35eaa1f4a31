"""Writes a release in every format of its scale, and measures what each quantized checkpoint lost."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import CALIBRATED_FORMATS, CALIBRATED_GGUF_TYPES, QuantizationRecipe
from flows.running.branches import Branches
from flows.running.run import AssessedModel, QuantizedModel, Run
from flows.running.run_step import run_step
from infra.registry.format_versions import ensure_format_version
from infra.registry.model_registry import FIGURES_TAG
from infra.step import Artifact
from tasks.data.packing.pack_phase import pack_phase
from tasks.prepared_data import PreparedData
from tasks.release.convert_to_gguf import GgufFiles, convert_to_gguf
from tasks.release.decide_quantization import Calibrations
from tasks.release.evaluate_quantized import AnsweredSuite, evaluate_quantized
from tasks.release.measure_importance import ImportanceMatrix, measure_importance
from tasks.release.quantize_checkpoint import quantize_checkpoint
from tasks.training.state.trained_checkpoint import TrainedCheckpoint

if TYPE_CHECKING:
    from mlflow import MlflowClient


def quantize_model(
    run: Run,
    prepared: PreparedData,
    assessed: AssessedModel,
    answered: Future[AnsweredSuite | None],
    texts: dict[str, Any],
) -> dict[str, QuantizedModel]:
    """Every format of `release.recipe.quantized_formats`, by its name; side by side where they are jobs on nodes.
    `answered` is asked each of them once it is written, `texts` calibrate."""
    recipe = run.scale.release.recipe
    recipes = {name: recipe.quantization_recipe(name) for name in recipe.quantized_formats}
    with Branches(run, are_side_by_side=releases_on_nodes(run)) as branches:
        models = {
            name: branches.begin(
                name,
                partial(
                    _quantize,
                    run,
                    prepared,
                    assessed,
                    answered,
                    name=name,
                    own=own,
                    texts=texts if own.calibration_rows else NO_TEXTS,
                ),
            )
            for name, own in recipes.items()
        }
    return {name: model.result() for name, model in models.items()}


def releases_on_nodes(run: Run) -> bool:
    """Whether conversion, quantization and reference are jobs on nodes."""
    return run.scale.release.resources.launcher != "local"


def _quantize(
    run: Run,
    prepared: PreparedData,
    assessed: AssessedModel,
    answered: Future[AnsweredSuite | None],
    *,
    name: str,
    own: QuantizationRecipe,
    texts: dict[str, Any],
) -> QuantizedModel:
    checkpoint, job = assessed.checkpoint, run.scale.release.resources
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
        evaluation=assessed.evaluation,
        benchmarks=answered.result(),
        recipe=run.scale.release.recipe.format_recipe(run.scale.evaluation.recipe),
        resources=job,
        job=job,
    )
    return QuantizedModel(quantized, evaluation)


def write_gguf_files(
    run: Run, checkpoint: Artifact[TrainedCheckpoint], texts: dict[str, Any]
) -> tuple[Artifact[GgufFiles], Artifact[ImportanceMatrix] | None]:
    """Every type of `release.recipe.gguf_types`, and the importance matrix that weighs them where one of them is
    calibrated."""
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
            **texts,
        )
    types = recipe.conversion_recipe()
    files = run_step(run, convert_to_gguf, checkpoint=checkpoint, importance=importance, recipe=types, job=job)
    return files, importance


def calibrations_of(
    models: Mapping[str, QuantizedModel], importance: Artifact[ImportanceMatrix] | None
) -> Calibrations:
    """What looked at text."""
    made = {name: model.checkpoint for name, model in models.items() if name in CALIBRATED_FORMATS}
    return Calibrations({**made, **({} if importance is None else {"the importance matrix": importance})})


NO_TEXTS: dict[str, Any] = {"packed": None, "shards": None, "chats": None}


def calibration_texts(run: Run, prepared: PreparedData) -> dict[str, Any]:
    """The first rows that the scale's last phase with rows would read, if it began there; none where the release has
    no calibrated format."""
    release = run.scale.release.recipe
    if not {*release.quantized_formats, *release.gguf_types} & {*CALIBRATED_FORMATS, *CALIBRATED_GGUF_TYPES}:
        return NO_TEXTS
    phase, num_rows = run.scale.calibration_phase, release.calibration_rows
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


def register_formats(
    client: MlflowClient, made_of: str, quantized: Mapping[str, QuantizedModel], run_id: str, root: Path
) -> str:
    """Each quantized checkpoint as a version of a registered model of its own, with what it lost. `made_of` is
    MODEL/VERSION, `root` the artifacts of MLflow's server on this machine."""
    done = [
        f"{name} {ensure_format_version(client, made_of, model.checkpoint, run_id, root, _figure_tags(model))}"
        for name, model in quantized.items()
    ]
    return ", ".join(done) or "none"


def _figure_tags(quantized: QuantizedModel) -> dict[str, str]:
    """What was measured of a format, for people; programs read the record that the key names."""
    record = quantized.evaluation.record
    changes = record.figures | {f"benchmark_{name}": each.change for name, each in record.benchmarks.items()}
    measured: dict[str, float | None] = {
        "num_bytes": record.num_bytes,
        "bits_per_byte": record.bits_per_byte,
        "original_bits_per_byte": record.original_bits_per_byte,
        "routing_agreement": record.routing_agreement,
        **{figure: change.value for figure, change in changes.items()},
        **{f"{figure}_change": change.change for figure, change in changes.items()},
    }
    tags = {f"glm46.{figure}": str(value) for figure, value in measured.items() if value is not None}
    return {**tags, f"{FIGURES_TAG}{record.quantized_format}": quantized.evaluation.key}
