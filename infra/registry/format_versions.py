"""Quantized checkpoints of a release in MLflow: a registered model for each format, MODEL-FORMAT, with a version for
each release, and the alias `release_N` for the one that was made of the model's version N.

Aliases of people (`champion`, ...) are on the model itself. Its version names its formats by tags, from which they are
served, compared and rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.registry.experiment_tracking import KEY_TAG
from infra.registry.model_registry import (
    DIGEST_TAG,
    Done,
    done_of,
    ensure_alias,
    ensure_files,
    ensure_tags,
    find_version,
    source_of_files,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from infra.step import Artifact

FORMAT_TAG = "glm46.format"
"""Name of the format; on the registered model, too: such a model is no result of a training."""
MADE_OF_TAG = "glm46.made_of"
"""MODEL/VERSION whose checkpoint was quantized."""


def ensure_format_version(
    client: MlflowClient,
    made_of: str,
    quantized: Artifact[Any],
    run_id: str,
    artifact_root: Path,
    figures: Mapping[str, str],
) -> Done:
    """Register a quantized checkpoint, if it is not, and point `release_N` at it.

    made_of: MODEL/N, the version whose checkpoint was quantized. figures: tags with what was measured. The source has
    no code that answers, unlike that of the model itself: vLLM, SGLang and transformers read it.
    """
    from mlflow.exceptions import MlflowException

    name: str = quantized.record.quantized_format
    model, _, release = made_of.rpartition("/")
    registered, description = f"{model}-{name}", f"{model} in format {name}, for vLLM, SGLang and transformers."
    try:
        client.create_registered_model(registered, {FORMAT_TAG: name}, description)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    own = {DIGEST_TAG: quantized.digest, KEY_TAG: quantized.key, FORMAT_TAG: name, MADE_OF_TAG: made_of}
    tags = {**figures, **own}
    existing = find_version(client, registered, quantized.digest)
    if existing is not None:
        made = existing.version
        files = ensure_files(client, registered, made, quantized, "hf", {}, artifact_root)
        done = done_of(files, ensure_tags(client, registered, existing, tags))
    else:
        place = f"model-{name}-{quantized.digest[:12]}"  # the same weights may be quantized again, by other code
        source = source_of_files(client, quantized, "hf", {}, run_id, artifact_root, place)
        made, done = str(client.create_model_version(registered, source, run_id, tags=tags).version), "done"
    moved = ensure_alias(client, registered, f"release_{release}", made)
    return done_of(done, moved)
