"""From which checkpoint a start continues, and which checkpoints must stay so that any kept one can be continued."""

from __future__ import annotations

from pathlib import Path

from configs.schema import TrainingRecipe
from tasks.training.state.checkpoints import (
    checkpoint_dir_of,
    discard_checkpoints,
    find_checkpoint,
    find_missing,
    read_index,
    saved_steps,
)
from tasks.training.state.position import Position
from tasks.training.state.saved_state import SavedState
from tasks.training.state.spikes import read_skipped


def protected_steps(work_dir: Path, recipe: TrainingRecipe, position: Position, num_kept: int) -> set[int]:
    """Steps whose checkpoints must outlive the save of this position, beside the newest `num_kept`: the way back before
    the steps that a spike at the next one would leave out, and the best measurement of each checkpoint that stays. A
    rollback to one of them brings back its position, whose best may be older than the present one."""
    steps = [*(step for step in saved_steps(work_dir) if step < position.step), position.step]
    base = position.step + 1 - recipe.spikes.skip_steps
    way_back = {step for step in [step for step in steps if step <= base][-1:]}
    if recipe.validation.keep != "best":
        return way_back
    positions = [position]
    for step in {*steps[-num_kept:], *way_back} - {position.step}:
        saved = saved_position(checkpoint_dir_of(work_dir, step))
        positions += [] if saved is None else [saved]
    return way_back | {each.best.step for each in positions if each.best is not None}


def find_continuation(work_dir: Path) -> tuple[Path | None, list[str]]:
    """As `find_checkpoint`, after what a kill left of a rollback is done: a checkpoint from within the steps that a
    recorded spike leaves out, and which does not know of it, is discarded. Raises FencedError."""
    while True:
        found, problems = find_checkpoint(work_dir)
        position = None if found is None else saved_position(found)
        if position is None:
            return found, problems
        undone = [part for part in read_skipped(work_dir) if part not in position.skipped]
        steps = [part.first_step for part in undone if position.step >= part.first_step]
        if not steps:
            return found, problems
        discard_checkpoints(work_dir, min(steps) - 1)


def saved_position(checkpoint_dir: Path) -> Position | None:
    """The position of a checkpoint; None where it is damaged, so that no start continues from it."""
    if find_missing(checkpoint_dir):
        return None
    saved = SavedState(checkpoint_dir, read_index(checkpoint_dir))
    text = bytes(saved.position_bytes())
    return None if saved.damage else Position.model_validate_json(text)
