"""Records steps on rank 0: metrics.jsonl, rollouts.jsonl, progress.json, time.json, and the trackers that show the
same metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from configs.files.progress_file import ProgressFile
from tasks.training.loop.phase_data import StepData
from tasks.training.loop.training_step import StepResult
from tasks.training.plan.phase_flops import phase_flops_per_token
from tasks.training.schedule.schedules import StepPlan
from tasks.training.state.job import METRICS_FILE, ROLLOUTS_FILE, TrainingJob
from tasks.training.state.measurements import Measurement
from tasks.training.state.position import Position
from tasks.training.watch.effective_time import TimeLog
from tasks.training.watch.metrics import StepLog, device_name, peak_memory_bytes
from tasks.training.watch.trackers import open_trackers


class StepRecord:
    """Lines after the position, written before a kill or a rollback, are dropped at the start."""

    def __init__(self, job: TrainingJob, position: Position) -> None:
        work_dir = Path(job.work_dir)
        self._job = job
        self._metrics = StepLog(work_dir / METRICS_FILE, position.step)
        self._rollouts = StepLog(work_dir / ROLLOUTS_FILE, position.step) if position.policy is not None else None
        self._progress = ProgressFile(work_dir)
        self._trackers = open_trackers(job, position.step)
        self._interval = _Interval()
        self._unlogged: Callable[[], dict[str, float]] | None = None
        """The values of the last step, which has no line so far."""
        self._time = TimeLog(work_dir, position.step, device_name(job.resources.device))
        self._step = position.step

    def _show_progress(self, position: Position, message: str, figure: float | None = None) -> None:
        self._progress.write(position.num_tokens, self._job.recipe.num_tokens, "tokens", message, figure)

    def waited(self, seconds: float) -> None:
        """For data; a policy makes its own, which is work."""
        self._interval.wait_seconds += seconds
        if self._rollouts is None:
            self._time.waited(seconds)

    def paused(self, seconds: float) -> None:
        """Leaves the seconds of a measurement or a checkpoint out of the training speed."""
        self._interval.paused_seconds += seconds
        self._time.paused(seconds)
        self._time.seen(self._step)

    def passed_over(self, position: Position, measured: Measurement | None) -> None:
        """A step that a spike left out has a line only where it was measured or saved, without losses and speed."""
        if self._interval.num_tokens:
            self.log_last()
        self._interval.num_skipped += 1
        self._step = position.step
        self._show_progress(position, "passed over after a spike")
        self._unlogged = partial(self._values_passed_over, position)
        if measured is not None:
            self.log_last(measured)

    def taken(
        self, position: Position, plan: StepPlan, data: StepData, result: StepResult, measured: Measurement | None
    ) -> None:
        """The line of a step, where one is due: at the interval, at the phase's end, of every measured step, and by
        `log_last` of every saved one."""
        self._interval.add(plan, result)
        self._step = position.step
        self._show_progress(position, *_watched(result, data))
        if self._rollouts is not None:
            self._rollouts.append(data.rollouts)
        self._unlogged = partial(self._values, position, plan, data.metrics, result)
        is_last = position.num_tokens >= self._job.recipe.num_tokens
        if measured is not None or is_last or position.step % self._job.resources.log_interval_steps == 0:
            self.log_last(measured)

    def log_last(self, measured: Measurement | None = None) -> None:
        """Write the line of the last step, unless it has one. It comes before each checkpoint: a start that continues
        from there knows nothing of the steps that are in no line."""
        if self._unlogged is None:
            return
        values = self._unlogged() | (measured.metrics() if measured is not None else {})
        self._metrics.append([{"step": self._step, **values}])
        self._time.seen(self._step)
        for tracker in self._trackers:
            tracker.log(self._step, values)
        self._unlogged = None
        if self._interval.num_tokens:
            self._interval = _Interval()
        else:
            self._interval.num_skipped = 0  # the seconds belong to the next step that is taken

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _values_passed_over(self, position: Position) -> dict[str, float]:
        num_skipped, num_rollbacks = self._interval.num_skipped, len(position.skipped)
        return {"tokens": position.course_tokens, "skipped_steps": num_skipped, "rollbacks": num_rollbacks}

    def _values(
        self, position: Position, plan: StepPlan, metrics: dict[str, float], result: StepResult
    ) -> dict[str, float]:
        job, interval = self._job, self._interval
        seconds = time.perf_counter() - interval.started - interval.paused_seconds
        attended_tokens = interval.squared_lengths / max(1, interval.num_positions)
        is_adapted = job.recipe.adapter.kind != "none"
        flops = phase_flops_per_token(job.recipe, attended_tokens, is_adapted) * interval.num_positions
        use = result.expert_use
        return {
            "tokens": position.course_tokens,
            "loss": result.total_loss,
            **result.losses.model_dump(),
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "batch_tokens": plan.end_tokens - plan.start_tokens,
            "mtp_weight": result.mtp_weight,
            "router_bias_rate": result.router_bias_rate,
            **{f"expert_load_{layer}": load for layer, load in enumerate(use.load)},
            **{f"expert_cv_{layer}": variation for layer, variation in enumerate(use.variation)},
            **{f"dead_experts_{layer}": number for layer, number in enumerate(use.num_dead)},
            "tokens_per_second": interval.num_tokens / seconds,
            "data_wait_seconds": interval.wait_seconds,
            "optimizer_seconds": interval.optimizer_seconds,
            "pause_seconds": interval.paused_seconds,
            "mfu": flops / seconds / job.resources.num_ranks / job.resources.peak_flops_per_second,
            "memory_bytes": peak_memory_bytes(),
            "attended_tokens": attended_tokens,
            "filled_positions": interval.num_positions,
            "skipped_steps": interval.num_skipped,
            "rollbacks": len(position.skipped),
            **metrics,
        }


class _Interval:
    """What happened since the last line of metrics.jsonl."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.num_tokens = self.num_positions = self.squared_lengths = self.num_skipped = 0
        self.wait_seconds = self.optimizer_seconds = self.paused_seconds = 0.0

    def add(self, plan: StepPlan, result: StepResult) -> None:
        self.num_tokens += plan.end_tokens - plan.start_tokens
        self.num_positions += result.num_positions
        self.squared_lengths += result.squared_lengths
        self.optimizer_seconds += result.optimizer_seconds


def _watched(result: StepResult, data: StepData) -> tuple[str, float]:
    """The figure that shows whether the phase learns, in words and as a number."""
    if "reward_mean" in data.metrics:
        reward, constant = (data.metrics[name] for name in ("reward_mean", "constant_group_share"))
        return f"reward {reward:.3f}, equal in {constant:.0%} of the groups", reward
    return f"loss {result.losses.lm:.3f}", result.losses.lm
