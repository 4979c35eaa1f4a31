"""`glm46 checkpoint`: the weights that phases left in the store, and those that unfinished phases saved."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from flows.cli.jobs import KEY_DIGITS
from infra.home import Home
from infra.step import Artifact, Manifest
from infra.storage.store import Store
from tasks.training.import_checkpoint import import_checkpoint
from tasks.training.state.checkpoints import checkpoint_dir_of, find_damage, read_index, saved_steps
from tasks.training.state.job import JOB_FILE, TrainingJob
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tasks.training.train_phase import copy_tokenizer, train_phase

ADAPTER_DIR = "adapter"


@dataclass(frozen=True)
class KnownCheckpoint:
    """The result of a phase in the store, or what an unfinished phase continues from."""

    key: str
    phase: str
    step: int
    num_bytes: int
    manifest: Manifest | None
    """None for a phase that has not ended: then the files are below `directory`."""
    directory: Path | None

    def describe(self) -> str:
        state = "committed" if self.manifest is not None else f"saved in {self.directory}"
        size = f"{self.num_bytes / 1e6:,.1f} MB"
        return f"{self.key[:KEY_DIGITS]}  {self.phase:<24} step {self.step:<9,} {size:>14}  {state}"


def list_checkpoints(home: Home, store: Store) -> list[KnownCheckpoint]:
    """The store's checkpoints by phase and key, then those of unfinished phases by key and step."""
    steps = (train_phase.name, import_checkpoint.name)
    committed = [
        KnownCheckpoint(
            manifest.key,
            manifest.record["phase"],
            manifest.record["num_steps"],
            sum(entry.size for entry in manifest.content.values()),
            manifest,
            None,
        )
        for manifest in store.iterate_manifests()
        if manifest.step in steps
    ]
    saved = []
    for path in sorted(home.work_root.glob(f"*/{JOB_FILE}")):
        phase = json.loads(path.read_text())["recipe"]["phase"]
        for step in saved_steps(path.parent):
            directory = checkpoint_dir_of(path.parent, step)
            num_bytes = sum(file.stat().st_size for file in directory.iterdir())
            saved.append(KnownCheckpoint(path.parent.name, phase, step, num_bytes, None, directory))
    return [*sorted(committed, key=lambda each: (each.phase, each.key)), *saved]


def find_checkpoints(home: Home, store: Store, key: str) -> list[KnownCheckpoint]:
    """All checkpoints of the one key that begins with `key`. Raises ValueError where there is none, or several do."""
    found = [each for each in list_checkpoints(home, store) if each.key.startswith(key)]
    if len({each.key for each in found}) != 1:
        problem = "no checkpoint has" if not found else f"{len({each.key for each in found})} checkpoints have"
        raise ValueError(f"{problem} a key that begins with {key}: `glm46 checkpoint list` shows those there are")
    return found


def damage_of(checkpoint: KnownCheckpoint, store: Store) -> str:
    """What differs from what was written, all files read; empty if nothing."""
    if checkpoint.manifest is not None:
        return ", ".join(f"{name} is missing or damaged" for name in store.broken_files(checkpoint.manifest, deep=True))
    assert checkpoint.directory is not None, checkpoint
    return find_damage(checkpoint.directory)


def consolidate(checkpoint: KnownCheckpoint, store: Store, target: Path) -> None:
    """Write a checkpoint's weights as a Hugging Face directory, with its adapter below adapter/ where it has one. Of an
    unfinished phase the newest undamaged checkpoint is taken. Raises ValueError where the directory exists."""
    if target.exists():
        raise ValueError(f"{target} exists: name a new directory")
    temporary = target.with_name(f".{target.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if checkpoint.manifest is not None:
            _copy_committed(checkpoint.manifest, store, temporary)
        else:
            _export_saved(checkpoint, temporary)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_committed(manifest: Manifest, store: Store, target: Path) -> None:
    artifact = Artifact(manifest, TrainedCheckpoint.model_validate(manifest.record), store)
    for name in manifest.content:
        directory, _, file = name.partition("/")
        if directory in ("hf", ADAPTER_DIR):
            path = target / (file if directory == "hf" else name)
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(artifact.path(name), path)


def _export_saved(checkpoint: KnownCheckpoint, target: Path) -> None:
    from tasks.training.state.export import export_weights
    from tasks.training.state.saved_state import SavedState

    assert checkpoint.directory is not None, checkpoint
    work_dir = checkpoint.directory.parents[1]
    newest_first = [checkpoint_dir_of(work_dir, step) for step in reversed(saved_steps(work_dir))]
    saved = next((each for each in newest_first if not find_damage(each)), None)
    if saved is None:
        raise ValueError(f"{work_dir} holds no undamaged checkpoint: run again from its start")
    job = TrainingJob.model_validate_json((work_dir / JOB_FILE).read_text())
    export_weights(job, SavedState(saved, read_index(saved)), target, target / ADAPTER_DIR)
    tokenizer = sorted(path for path in Path(job.tokenizer_path).parent.iterdir() if path.is_file())
    copy_tokenizer(tokenizer, job.recipe.objective.kind != "pretrain", target)
