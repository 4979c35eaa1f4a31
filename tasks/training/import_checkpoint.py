"""Step: imports a Hugging Face `glm4_moe` directory as a checkpoint for training, evaluation and release.

In: the directory, the tokenizer of the prepared data. Out: hf/ with the weights in their dtype (hard links to the
directory's files on one file system) and handover/ with a position only: ranks read hf/, and begin with fresh moments.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.files.atomic_files import link_or_copy
from infra.step import Artifact, Output, digest_of, step
from infra.storage.store import hash_file
from model.architecture.counts import count_parameters
from model.formats.checkpoint_template import checkpoint_template
from tasks.training.input_rules import OF_THE_PHASE
from tasks.training.state.trained_checkpoint import WEIGHTS_SUFFIX, TrainedCheckpoint, chat_template_digest

if TYPE_CHECKING:
    from configs.schema import ModelRecipe
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer

IMPORTED = "imported"
"""Course and phase name of weights that no phase of ours trained: a phase that starts from them begins with fresh
moments."""


SUFFIXES = (WEIGHTS_SUFFIX, ".json", ".jinja", ".model", ".txt")
"""Endings of weights, configuration, tokenizer and chat template."""


@dataclass(frozen=True)
class CheckpointDir:
    """A directory on this machine and the digest of its files."""

    path: Path
    digest: str


def describe_checkpoint_dir(path: Path) -> CheckpointDir:
    """Digest of a Hugging Face directory."""
    return CheckpointDir(path.absolute(), digest_of({file.name: hash_file(file) for file in checkpoint_files(path)}))


def checkpoint_files(path: Path) -> list[Path]:
    """The files of a checkpoint; what a training left beside them (optimizer.pt) is no part of it."""
    return sorted(file for file in path.iterdir() if file.is_file() and file.suffix in SUFFIXES)


def refuse_foreign_checkpoint(path: Path, recipe: ModelRecipe) -> None:
    """Raises ValueError for a directory that holds no checkpoint, or one of another architecture than the scale's. Of
    the weights the headers are read."""
    from model.formats.hf_checkpoint import CheckpointTensors

    refuse_other_config(path, recipe)
    CheckpointTensors(path, recipe)


def refuse_other_config(path: Path, recipe: ModelRecipe) -> None:
    """Raises ValueError where config.json is of another architecture than the scale's."""
    from model.formats.adapter_files import refuse_adapter
    from model.formats.hf_checkpoint import CONFIG_FILE, read_config

    refuse_adapter(path)
    theirs = read_config(path)
    if recipe.num_nextn_predict_layers > theirs.num_nextn_predict_layers:
        raise ValueError(
            f"{path} holds no MTP layer, as transformers leaves it out when it saves a model, and the scale has one: "
            "set num_nextn_predict_layers to 0 in the scale's model section"
        )
    names = [name for name in type(recipe).model_fields if name not in OF_THE_PHASE]
    differing = [name for name in names if getattr(recipe, name) != getattr(theirs, name)]
    if differing:
        parts = ", ".join(
            f"{name} {getattr(theirs, name)} (the scale has {getattr(recipe, name)})" for name in differing
        )
        raise ValueError(f"{path / CONFIG_FILE}: {parts}; name a scale of the same architecture")


def refuse_foreign_tokenizer(path: Path, sha256: str) -> None:
    """Raises ValueError where the directory's tokenizer.json is not the one that the data is tokenized with."""
    theirs = path / "tokenizer.json"
    if not theirs.is_file() or hash_file(theirs) != sha256:
        raise ValueError(
            f"{path}: its tokenizer.json is not the one that the data is tokenized with (sha256 {sha256[:12]}...), so "
            f"its ids would mean other text: set data.recipe.tokenizer to kind given, with the path {theirs} and its "
            f"sha256"
        )


@step(content=("hf/*", "handover/*"), distributions=("torch", "safetensors"))
def import_checkpoint(
    *, source: CheckpointDir, tokenizer: Artifact[TrainedTokenizer], recipe: ModelRecipe, output: Output
) -> TrainedCheckpoint:
    """Raises ValueError where architecture, tensors or tokenizer differ from the scale's."""
    from model.formats.hf_checkpoint import CONFIG_FILE, canonical_config

    refuse_foreign_checkpoint(source.path, recipe)
    refuse_foreign_tokenizer(source.path, hash_file(tokenizer.path("tokenizer.json")))
    output.path("handover/state.json").write_text(imported_position())
    for file in checkpoint_files(source.path):
        keep = link_or_copy if file.suffix == WEIGHTS_SUFFIX else shutil.copyfile
        keep(file.resolve(), output.path(f"hf/{file.name}"))  # the Hub's cache has symbolic links
    output.path(f"hf/{CONFIG_FILE}").write_text(json.dumps(canonical_config(source.path), indent=2) + "\n")
    return TrainedCheckpoint(
        phase=IMPORTED,
        objective=IMPORTED,
        num_steps=0,
        num_tokens=0,
        course=IMPORTED,
        course_tokens=0,
        lm_loss=None,
        mtp_loss=None,
        balance_loss=None,
        num_rollbacks=0,
        validation_bits_per_byte={},
        mean_reward=None,
        is_chat_trained=has_chat_template(source.path),
        chat_template_digest=chat_template_digest(),
        num_parameters=count_parameters(recipe).total,
        tokenizer_digest=tokenizer.digest,
        special_token_ids=tokenizer.record.special_ids,
        export_digest=digest_of({path.name: hash_file(path) for path in sorted(output.path("hf/x").parent.iterdir())}),
    )


def imported_position() -> str:
    """The state.json of weights that no phase of ours trained."""
    import torch

    from tasks.training.state.position import Position
    from tasks.training.state.state import random_state_hex

    torch.manual_seed(0)
    position = Position(
        course=IMPORTED,
        phase=IMPORTED,
        step=0,
        num_tokens=0,
        course_tokens=0,
        optimizer_steps=0,
        torch_random_state=random_state_hex(),
        losses=None,
        policy=None,
    )
    return position.model_dump_json(indent=1) + "\n"


def has_chat_template(path: Path) -> bool:
    """Whether the directory has a chat template. It is taken as a sign that these weights were trained on
    conversations: our own exports have one only then."""
    return checkpoint_template(path) is not None
