"""Checks what `--start` names before anything is computed: a committed checkpoint, a Hugging Face directory or
alias."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import Scale
from infra.registry.model_registry import RegisteredVersion, describe_aliases, model_name, resolve_alias
from infra.registry.promotion import FORGOTTEN_TAG, refusal_of
from infra.storage.store import Store
from model.formats.checkpoint_template import given_template, renders_otherwise
from tasks.data.readers.source_bytes import HUGGING_FACE
from tasks.training.fetch_checkpoint import fetch_checkpoint
from tasks.training.import_checkpoint import import_checkpoint, refuse_foreign_checkpoint, refuse_foreign_tokenizer
from tasks.training.train_phase import train_phase

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY_DIGITS = 64


def local_start(scale: Scale, start: str | None) -> str | None:
    """What `--start` names, a model of the Hugging Face Hub as the directory into which it was fetched."""
    if start is None or not start.startswith(HUGGING_FACE):
        return start
    return str(fetch_checkpoint(start, scale.model.recipe))


def check_start(scale: Scale, start: str, store: Store, registry: Callable[[], MlflowClient]) -> None:
    """Raises ValueError where there is no such checkpoint, it may not be trained on, or a directory's is of another
    architecture than the scale's. The tokenizer of a directory is compared with a given one; with a trained one
    once that is known."""
    if Path(start).is_dir():
        refuse_foreign_checkpoint(Path(start), scale.model.recipe)
        given = scale.data.recipe.tokenizer
        if given.kind == "given":
            refuse_foreign_tokenizer(Path(start), given.sha256)
    elif is_key(start):
        manifest = store.read_manifest(start)
        if manifest is None or manifest.step not in (train_phase.name, import_checkpoint.name):
            held = "nothing" if manifest is None else f"an artifact of step {manifest.step}"
            raise ValueError(
                f"--start {start[:12]}...: store {store.uri} holds {held} under this key: name a trained checkpoint's"
            )
    else:
        refuse_taken_down(start, version_of_alias(registry(), scale, start))


def refuse_other_template(start: str) -> None:
    """Raises ValueError for a directory whose weights are released as they are, and whose chat template is not the one
    in which they are evaluated: the served model would be asked in another than was judged."""
    template = given_template(Path(start)) if Path(start).is_dir() else None
    if template is not None and renders_otherwise(template):
        raise ValueError(
            f"--start {start}: its chat template writes conversations otherwise than GLM-4.6's, in which a release is "
            f"evaluated, and its GGUF would hold the other: begin with --from a phase that trains on conversations, "
            f"or try the weights as they are with glm46 eval {start} and glm46 convert, which keep its template"
        )


def refuse_taken_down(start: str, version: RegisteredVersion | None) -> None:
    """Raises ValueError for weights that know a text which was taken down: what is trained on them would know it,
    too."""
    if version is not None and FORGOTTEN_TAG in version.tags:
        raise ValueError(f"--start {start}: {refusal_of(version)}")


def is_key(start: str) -> bool:
    """Whether `start` is spelled as the key of a step."""
    return len(start) == KEY_DIGITS and set(start) <= set("0123456789abcdef")


def version_of_alias(client: MlflowClient, scale: Scale, alias: str) -> RegisteredVersion:
    """The version of the scale's model that an alias names. Raises ValueError where there is none."""
    name = model_name(scale.scale)
    version = None if "/" in alias else resolve_alias(client, name, alias)
    if version is None:
        raise ValueError(
            f"--start {alias}: no directory of that name, no {KEY_DIGITS}-digit checkpoint key, and no alias of model "
            f"{name} "
            f"({describe_aliases(client, name)})"
        )
    return version
