"""From which checkpoint a start continues, and which ones stay so that every kept one can be continued."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch.distributed as dist

from configs.schema import ValidationRecipe
from tasks.training.state.checkpoints import (
    DamagedCheckpointError,
    checkpoint_dir_of,
    discard_checkpoints,
    finish_checkpoint,
    saved_steps,
    start_checkpoint,
    write_file,
)
from tasks.training.state.continuation import find_continuation, protected_steps, saved_position
from tasks.training.state.measurements import Measurement, better
from tasks.training.state.position import Position
from tasks.training.state.saved_state import STATE_FILE
from tasks.training.state.spikes import Spike, read_skipped, record_spike, skipped_by
from tasks.training.state.state import load_checkpoint
from tests.support.training_inputs import small_recipe

NUM_KEPT, SAVED_EVERY, MEASURED_EVERY = 2, 5, 20
RECIPE = small_recipe(validation=ValidationRecipe(interval_tokens=128, num_tokens=50, keep="best").model_dump())
RECIPE = RECIPE.model_copy(update={"spikes": RECIPE.spikes.model_copy(update={"skip_steps": 4})})
START = Position(
    course="c",
    phase="p",
    step=0,
    num_tokens=0,
    course_tokens=0,
    optimizer_steps=0,
    torch_random_state="",
    losses=None,
    policy=None,
)


def commit(work_dir: Path, position: Position, protected: Collection[int] = ()) -> Path:
    temporary = start_checkpoint(work_dir, position.step)
    files = {STATE_FILE: write_file(temporary / STATE_FILE, position.model_dump_json().encode())}
    return finish_checkpoint(work_dir, position.step, files, NUM_KEPT, protected)


def trained(work_dir: Path, position: Position, last_step: int, bits_per_byte: dict[int, float]) -> Position:
    """The position after these steps, which saved as the worker does."""
    for step in range(position.step + 1, last_step + 1):
        position = position.model_copy(update={"step": step})
        if step % MEASURED_EVERY == 0:
            measured = Measurement(step=step, bits_per_byte={"web": bits_per_byte[step]}, nats_per_token={})
            position = position.model_copy(update={"best": better(position.best, measured)})
        if step % SAVED_EVERY == 0:
            commit(work_dir, position, protected_steps(work_dir, RECIPE, position, NUM_KEPT))
    return position


def test_the_best_of_a_checkpoint_outlives_a_better_one_that_a_rollback_undoes(tmp_path):
    trained(tmp_path, START, 41, {20: 1.00, 40: 0.99})
    assert saved_steps(tmp_path) == [20, 35, 40]
    spike = Spike(41, "inf", 1.0, 1.0, None, None, None)
    discard_checkpoints(tmp_path, skipped_by(RECIPE.spikes, spike).first_step - 1)
    position = saved_position(checkpoint_dir_of(tmp_path, 35))
    assert position is not None and position.best is not None and position.best.step == 20
    position = trained(tmp_path, position, 60, {40: 1.01, 60: 1.02})
    assert position.best is not None and position.best.step == 20
    assert saved_steps(tmp_path) == [20, 55, 60]


def test_a_best_that_no_kept_checkpoint_names_is_dropped(tmp_path):
    trained(tmp_path, START, 60, {20: 1.00, 40: 0.99, 60: 1.02})
    assert saved_steps(tmp_path) == [40, 55, 60]


def test_a_damaged_checkpoint_protects_nothing(tmp_path):
    trained(tmp_path, START, 40, {20: 1.00, 40: 0.99})
    (checkpoint_dir_of(tmp_path, 35) / STATE_FILE).unlink()
    position = START.model_copy(update={"step": 41})
    assert saved_position(checkpoint_dir_of(tmp_path, 35)) is None
    assert protected_steps(tmp_path, RECIPE, position, NUM_KEPT) == {35, 40}


def test_a_rollback_that_a_kill_interrupts_is_finished_by_the_next_start(tmp_path):
    trained(tmp_path, START, 41, {20: 1.00, 40: 0.99})
    spike = Spike(41, "inf", 1.0, 1.0, None, None, None)
    record_spike(tmp_path, spike, skipped_by(RECIPE.spikes, spike), True, {})
    found, problems = find_continuation(tmp_path)
    assert found == checkpoint_dir_of(tmp_path, 35) and not problems
    assert saved_steps(tmp_path) == [20, 35]


def test_a_checkpoint_that_knows_of_the_steps_left_out_is_continued(tmp_path):
    spike = Spike(41, "inf", 1.0, 1.0, None, None, None)
    record_spike(tmp_path, spike, skipped_by(RECIPE.spikes, spike), True, {})
    commit(tmp_path, START.model_copy(update={"step": 40, "skipped": read_skipped(tmp_path)}))
    assert find_continuation(tmp_path)[0] == checkpoint_dir_of(tmp_path, 40)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_checkpoint_that_is_missing_is_a_damaged_one_so_that_training_goes_back_to_before_it(alone, tmp_path):
    with pytest.raises(DamagedCheckpointError, match=r"step-000000020 is corrupt \(index.json cannot be read"):
        load_checkpoint(None, checkpoint_dir_of(tmp_path, 20))  # pyright: ignore[reportArgumentType]
