"""The training worker: one process per rank, `python -m tasks.training.worker JOB.json`, started by a launcher.

In: a TrainingJob, packed rows and shards or prompts; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Out, in the job's work directory:
metrics.jsonl, rollouts.jsonl, progress.json, checkpoints/, and at the end final/ with hf/ and handover/. Runs until the phase's token
budget is spent; SIGTERM saves and exits with EXIT_INTERRUPTED. A second start continues from the newest verified checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from configs.schema import PolicyObjective, TrainingRecipe
from model.counts import training_flops_per_token
from tasks.training.checkpoints import FencedError
from tasks.training.export import export_checkpoint
from tasks.training.job import ROLLOUTS_FILE, TrainingJob
from tasks.training.metrics import ProgressFile, StepLog, peak_memory_bytes
from tasks.training.phase_data import PhaseData, StepData, open_phase_data
from tasks.training.prepare_training import prepare_training, save_state
from tasks.training.rewards import RewardError
from tasks.training.schedules import StepPlan, plan_step
from tasks.training.state import PolicyProgress, Position, random_state_hex
from tasks.training.training_step import NonFiniteLossError, StepResult, Trainable, pass_over, take_step

EXIT_INTERRUPTED = 75
"""EX_TEMPFAIL, the code that infra/supervisor.py takes for saved and to be continued."""


@dataclass
class Training:
    """What the loop carries from step to step."""

    job: TrainingJob
    trainable: Trainable
    data: PhaseData
    position: Position
    is_interrupted: bool = False

    @property
    def work_dir(self) -> Path:
        return Path(self.job.work_dir)


def configure_process(job: TrainingJob) -> None:
    """Fixed threads, deterministic kernels, seed, process group, quiet libraries."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(job.recipe.num_threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(job.recipe.seed)
    # DeepSpeed's autotuner imports it where it is installed: two seconds, and nothing here may talk to a tracker.
    sys.modules["mlflow"] = None  # pyright: ignore[reportArgumentType]
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed()


def prepare(job: TrainingJob) -> Training:
    trainable, position = prepare_training(job)
    return Training(job, trainable, open_phase_data(job, trainable.model), position)


def train(training: Training) -> None:
    """Step until the budget is spent or the run is interrupted; save at intervals and at the end."""
    job, is_writer = training.job, dist.get_rank() == 0
    metrics = StepLog(training.work_dir / "metrics.jsonl", training.position.step) if is_writer else None
    rollouts = StepLog(training.work_dir / ROLLOUTS_FILE, training.position.step) if training.position.policy is not None else None
    progress = ProgressFile(training.work_dir, job.recipe.num_tokens) if is_writer else None
    interval = _Interval()
    saved_step = training.position.step
    while training.position.num_tokens < job.recipe.num_tokens and not _any_rank_interrupted(training):
        plan = plan_step(job.recipe, training.position.num_tokens)
        waited_from = time.perf_counter()
        data = training.data.read(plan, training.position.step + 1)
        interval.wait_seconds += time.perf_counter() - waited_from
        if data.micro_batches:
            result = take_step(training.trainable, job.recipe, plan, data.micro_batches, training.position.step + 1)
        else:
            result = pass_over(job.recipe, plan)
        training.position = _advance(training.position, plan, data, result)
        _refuse_constant_rewards(job.recipe, training.position)
        interval.num_tokens += plan.end_tokens - plan.start_tokens
        interval.num_positions += result.num_positions
        interval.optimizer_seconds += result.optimizer_seconds
        is_last = training.position.num_tokens >= job.recipe.num_tokens
        if progress is not None:
            progress.write(training.position.num_tokens, _message(result, data))
        if rollouts is not None:
            rollouts.append(data.rollouts)
        if metrics is not None and (is_last or training.position.step % job.resources.log_interval_steps == 0):
            metrics.append([_metrics_line(job, training.position, plan, data, result, interval)])
            interval = _Interval()
        if training.position.step % job.resources.save_interval_steps == 0 or is_last:
            save(training)
            saved_step = training.position.step
    if saved_step != training.position.step:
        save(training)


def save(training: Training) -> None:
    save_state(training.job, training.trainable, training.position)


class _Interval:
    """What happened since the last line of metrics.jsonl."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.num_tokens = 0
        self.num_positions = 0
        self.wait_seconds = 0.0
        self.optimizer_seconds = 0.0


def _advance(position: Position, plan: StepPlan, data: StepData, result: StepResult) -> Position:
    num_tokens, is_taken = plan.end_tokens - plan.start_tokens, bool(data.micro_batches)
    policy = position.policy
    if policy is not None:
        policy = PolicyProgress(
            mean_rewards=(*policy.mean_rewards, data.metrics["reward_mean"]),
            num_constant_steps=0 if is_taken else policy.num_constant_steps + 1,
        )
    return position.model_copy(
        update={
            "step": position.step + 1, "num_tokens": position.num_tokens + num_tokens, "course_tokens": plan.end_tokens,
            "optimizer_steps": position.optimizer_steps + is_taken, "torch_random_state": random_state_hex(), "losses": result.losses,
            "policy": policy,
        }
    )  # fmt: skip


def _refuse_constant_rewards(recipe: TrainingRecipe, position: Position) -> None:
    if position.policy is None or not isinstance(recipe.objective, PolicyObjective):
        return
    num_steps = position.policy.num_constant_steps
    if num_steps >= recipe.objective.max_constant_steps:
        reward = position.policy.mean_rewards[-1]
        raise RewardError(
            f"step {position.step}: in {num_steps} steps in a row (objective.max_constant_steps) no group had two different rewards, the "
            f"last step's mean reward is {reward:g}: nothing can be learned from them. Where it is low, train the phase before longer or "
            "ask easier prompts; where it is high, ask harder ones"
        )


def _message(result: StepResult, data: StepData) -> str:
    return f"loss {result.losses.lm:.3f}" if "reward_mean" not in data.metrics else f"reward {data.metrics['reward_mean']:.3f}"


def _metrics_line(
    job: TrainingJob, position: Position, plan: StepPlan, data: StepData, result: StepResult, interval: _Interval
) -> dict[str, object]:
    seconds = time.perf_counter() - interval.started
    flops_per_second = training_flops_per_token(job.recipe.model, job.recipe.sequence_length) * interval.num_positions / seconds
    return {
        "step": position.step, "tokens": position.course_tokens, "loss": result.total_loss, **result.losses.model_dump(),
        "grad_norm": result.grad_norm, "learning_rate": result.learning_rate, "batch_tokens": plan.end_tokens - plan.start_tokens,
        **{f"expert_load_{layer}": load for layer, load in enumerate(result.expert_load)},
        "tokens_per_second": interval.num_tokens / seconds, "data_wait_seconds": interval.wait_seconds,
        "optimizer_seconds": interval.optimizer_seconds,
        "mfu": flops_per_second / job.resources.num_ranks / job.resources.peak_flops_per_second, "memory_bytes": peak_memory_bytes(),
        **data.metrics,
    }  # fmt: skip


def _any_rank_interrupted(training: Training) -> bool:
    if dist.get_world_size() > 1:  # a signal reaches ranks at different steps
        flag = torch.tensor(int(training.is_interrupted))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        training.is_interrupted = bool(flag)
    return training.is_interrupted


def run(job: TrainingJob) -> int:
    """Exit code of this rank."""
    started = time.monotonic()
    configure_process(job)
    training = prepare(job)
    signal.signal(signal.SIGTERM, lambda number, frame: setattr(training, "is_interrupted", True))
    print(f"ready in {time.monotonic() - started:.1f} s at step {training.position.step}", flush=True)
    train(training)
    if training.position.num_tokens < job.recipe.num_tokens:
        print(f"interrupted: saved at step {training.position.step}", flush=True)
        return EXIT_INTERRUPTED
    if dist.get_rank() == 0:
        export_checkpoint(job, training.trainable.model)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main() -> int:
    job = TrainingJob.model_validate_json(Path(sys.argv[1]).read_bytes())
    try:
        return run(job)
    except (ValueError, NonFiniteLossError, RewardError, FencedError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
