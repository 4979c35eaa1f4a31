"""The lines of metrics.jsonl, and the figures of a profiled step."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.load import load_scale
from configs.schema import TrainingRecipe
from model.architecture.counts import training_flops_per_token
from tasks.monitoring.metric_table import Figures
from tasks.monitoring.step_lines import FollowedLines, add_steps
from tasks.training.loop.phase_data import StepData
from tasks.training.loop.training_step import ExpertUse, StepResult
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.plan.phase_flops import phase_flops_per_token
from tasks.training.schedule.schedules import StepPlan, plan_step
from tasks.training.state.job import TrainingJob
from tasks.training.state.measurements import Measurement
from tasks.training.state.position import Position, StepLosses
from tasks.training.watch.profiling import WARMUP_STEPS, StepProfiler
from tasks.training.watch.step_record import StepRecord
from tests.support.training_inputs import RESOURCES, small_recipe

LOSSES = StepLosses(lm=3.0, mtp=4.0, balance=1.0)
NUM_POSITIONS, ATTENDED = 60, 10


def adapter_recipe() -> TrainingRecipe:
    scale = load_scale("air_lora")
    return scale.training_recipe(scale.phases[0])


def job_of(work_dir: Path, recipe: TrainingRecipe, **resources: Any) -> TrainingJob:
    changed = RESOURCES.model_copy(update=resources)
    return cast(TrainingJob, SimpleNamespace(recipe=recipe, resources=changed, work_dir=str(work_dir)))


class Steps:
    """A phase whose steps all took the same."""

    def __init__(self, job: TrainingJob, step: int = 0) -> None:
        self.job, self.step, self.num_tokens = job, 0, 0
        for _ in range(step):
            self._go_on()
        self.record = StepRecord(job, self.position)

    def _go_on(self) -> StepPlan:
        plan = plan_step(self.job.recipe, self.num_tokens)
        self.step, self.num_tokens = self.step + 1, self.num_tokens + plan.end_tokens - plan.start_tokens
        return plan

    @property
    def position(self) -> Position:
        return Position(
            course="c",
            phase="p",
            step=self.step,
            num_tokens=self.num_tokens,
            course_tokens=self.num_tokens,
            optimizer_steps=self.step,
            torch_random_state="",
            losses=LOSSES,
            policy=None,
        )

    def take(self, number: int, **metrics: float) -> None:
        for _ in range(number):
            plan, batch = self._go_on(), cast(MicroBatch, None)
            use = ExpertUse((), (), ())
            result = StepResult(LOSSES, 3.4, 0.7, 1e-3, 0.1, 0.001, use, 0.1, NUM_POSITIONS, NUM_POSITIONS * ATTENDED)
            self.record.taken(self.position, plan, StepData([batch], metrics=metrics), result, None)

    def pass_over(self, measured: Measurement | None = None) -> None:
        self._go_on()
        self.record.passed_over(self.position, measured)


def lines(work_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_policy_shows_its_reward_and_the_groups_that_teach_nothing(tmp_path):
    steps = Steps(job_of(tmp_path, small_recipe(num_steps=6)))
    steps.take(1, reward_mean=0.25, constant_group_share=0.625)
    shown = json.loads((tmp_path / "progress.json").read_text())
    assert (shown["message"], shown["figure"]) == ("reward 0.250, equal in 62% of the groups", 0.25)


def test_the_share_of_the_peak_leaves_out_the_gradients_of_frozen_weights(tmp_path, monkeypatch):
    recipe, clock = adapter_recipe(), iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    steps = Steps(job_of(tmp_path, recipe, log_interval_steps=1, peak_flops_per_second=1e12, num_ranks=1))
    steps.take(1)
    (line,) = lines(tmp_path)
    assert line["mfu"] * 1e12 == pytest.approx(phase_flops_per_token(recipe, ATTENDED, True) * NUM_POSITIONS)
    assert line["mfu"] * 1e12 < 0.8 * phase_flops_per_token(recipe, ATTENDED) * NUM_POSITIONS


def test_the_formula_beside_profiled_flops_leaves_out_the_gradients_of_frozen_weights(tmp_path):
    profile, recipe = RESOURCES.profile.model_copy(update={"steps": 1, "flops": True}), adapter_recipe()
    profiler = StepProfiler(job_of(tmp_path, recipe, profile=profile), cast(Any, None))
    for _ in range(WARMUP_STEPS + 1):
        with profiler.step([]):
            pass
    figures = json.loads((tmp_path / "profile" / "flops.json").read_text())
    assert figures["formula_flops_per_token"] == training_flops_per_token(recipe.model, 0, True, trains_mtp=False)


def test_every_position_is_in_a_line_once_over_a_kill_after_a_checkpoint(tmp_path):
    job = job_of(tmp_path, small_recipe(num_steps=6), log_interval_steps=2)
    steps = Steps(job)
    steps.take(3)
    steps.record.log_last()  # as before a checkpoint
    steps.record.log_last()
    steps.take(2)
    assert [line["step"] for line in lines(tmp_path)] == [2, 3, 4]
    Steps(job, step=3).take(3)
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [2, 3, 4, 6]
    assert [line["filled_positions"] for line in written] == [
        2 * NUM_POSITIONS,
        *[NUM_POSITIONS] * 2,
        2 * NUM_POSITIONS,
    ]


def test_a_step_that_a_spike_left_out_has_no_losses_and_no_speed_in_its_line(tmp_path, monkeypatch):
    """The steps before it come into a line of their own; its measurement is no time of the step after it."""
    steps = Steps(job_of(tmp_path, small_recipe(num_steps=6), log_interval_steps=6))
    monkeypatch.setattr(time, "perf_counter", lambda: float(steps.step))
    steps.take(2)
    steps.pass_over()
    steps.pass_over(Measurement(step=4, bits_per_byte={"web": 2.0}, nats_per_token={"web": 1.5}))
    steps.take(2)
    before, left_out, after = lines(tmp_path)
    assert left_out == {
        "step": 4,
        "tokens": 4 * 64,
        "skipped_steps": 2,
        "rollbacks": 0,
        "validation_bits_per_byte": 2.0,
        "validation_bits_per_byte_web": 2.0,
        "validation_loss_web": 1.5,
    }
    assert (before["step"], before["skipped_steps"], before["filled_positions"]) == (2, 0, 2 * NUM_POSITIONS)
    assert (after["step"], after["skipped_steps"], after["filled_positions"]) == (6, 0, 2 * NUM_POSITIONS)
    assert after["tokens_per_second"] == 2 * 64 / 3, "two steps in the seconds since the last one that was taken"


def test_steps_left_out_are_in_a_line_before_a_checkpoint_and_the_exporter_reads_it(tmp_path):
    steps = Steps(job_of(tmp_path, small_recipe(num_steps=6), log_interval_steps=1))
    steps.take(1)
    steps.pass_over()
    steps.record.log_last()
    assert [sorted(line) for line in lines(tmp_path)[1:]] == [["rollbacks", "skipped_steps", "step", "tokens"]]
    followed, figures = FollowedLines(tmp_path / "metrics.jsonl").look(), Figures()
    add_steps(figures, followed, 16, "toy", "sft", "1")
    samples = {sample.name: sample.value for family in figures.families() for sample in family.samples}
    assert followed.num_unreadable == 0 and followed.latest["loss"] == 3.4
    assert (samples["training_steps_total"], samples["training_skipped_steps_total"]) == (2, 1)
