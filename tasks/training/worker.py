"""The training worker: one process per rank, `python -m tasks.training.worker JOB.json`, started by a launcher.

In: a TrainingJob, packed rows and shards, preference pairs or prompts; RANK, WORLD_SIZE and GLM46_RENDEZVOUS. Out, in
the job's work directory: metrics.jsonl, rollouts.jsonl, spikes.jsonl, progress.json, time.json, tensorboard/, wandb/,
profile/, checkpoints/, and at the end final/ with hf/ and handover/, after pairs with pairs/.

It runs until the phase's token budget is spent. SIGTERM saves and exits with os.EX_TEMPFAIL. A second start continues
from the newest verified checkpoint. After a spike it goes back to a checkpoint from before the steps then left out.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from configs.schema import TrainingRecipe
from model.kernels.cpu_products import onednn_products
from tasks.data.prompts.verifiers import VerifierError
from tasks.training.loop.critic_training import update_critic
from tasks.training.loop.pair_data import HeldOutPairs
from tasks.training.loop.pair_scores import leave_scores
from tasks.training.loop.phase_data import PhaseData, StepData, open_phase_data
from tasks.training.loop.prepare_training import prepare_training
from tasks.training.loop.rank_process import Interruption, configure_process
from tasks.training.loop.training_step import NO_LOSSES, StepResult, pass_over, take_step
from tasks.training.loop.validation import HeldOut
from tasks.training.parallel.control import leave_together, on_first_rank, wait_for_all
from tasks.training.parallel.trainable import Trainable
from tasks.training.policy.rewards import RewardError, refuse_constant_rewards
from tasks.training.policy.rollouts import SAMPLING_PARTS
from tasks.training.policy.served_engine import EngineError
from tasks.training.schedule.schedules import StepPlan, plan_step, trains_mtp
from tasks.training.state.checkpoints import DamagedCheckpointError, FencedError, checkpoint_dir_of, discard_checkpoints
from tasks.training.state.continuation import protected_steps
from tasks.training.state.export import export_checkpoint
from tasks.training.state.job import TrainingJob
from tasks.training.state.measurements import Measurement, better, is_due
from tasks.training.state.node_checkpoints import NodeCheckpoints
from tasks.training.state.position import PolicyProgress, Position
from tasks.training.state.spikes import (
    Spike,
    SpikeError,
    TooManySpikesError,
    extend_window,
    is_skipped,
    num_counted_rollbacks,
    read_skipped,
    record_spike,
    skipped_by,
    too_many_spikes,
)
from tasks.training.state.state import load_checkpoint, random_state_hex
from tasks.training.watch.profiling import StepProfiler
from tasks.training.watch.step_record import StepRecord

STOPS = (ValueError, OSError, TooManySpikesError, RewardError, VerifierError, EngineError, FencedError)
"""Errors whose sentence says what to do: a rank ends with it in place of a traceback."""


@dataclass
class Training:
    """What the loop carries from step to step."""

    job: TrainingJob
    trainable: Trainable
    data: PhaseData
    held_out: HeldOut | HeldOutPairs | None
    position: Position
    record: StepRecord | None
    """Of rank 0."""
    profiler: StepProfiler | None
    checkpoints: NodeCheckpoints
    saved_step: int

    @property
    def work_dir(self) -> Path:
        return Path(self.job.work_dir)

    @property
    def is_done(self) -> bool:
        return self.position.num_tokens >= self.job.recipe.num_tokens

    def close(self) -> None:
        self.data.close()
        if self.record is not None:
            self.record.close()


def prepare(job: TrainingJob) -> Training:
    """Everything at the run's present position; called again after a rollback."""
    started = time.monotonic()
    torch.manual_seed(job.recipe.seed)
    trainable, position = prepare_training(job)
    trainable.model.runs_mtp = trains_mtp(job.recipe)
    print(f"ready in {time.monotonic() - started:.1f} s at step {position.step}", flush=True)
    skipped = max(
        position.skipped, read_skipped(Path(job.work_dir)), key=len
    )  # the file knows of a spike before a checkpoint does
    position = position.model_copy(update={"skipped": skipped})
    is_writer, profile = dist.get_rank() == 0, job.resources.profile
    return Training(
        job,
        trainable,
        open_phase_data(job, trainable),
        open_held_out(job),
        position,
        StepRecord(job, position) if is_writer else None,
        StepProfiler(job, trainable) if is_writer and profile.steps and (profile.flops or profile.trace) else None,
        NodeCheckpoints(job),
        saved_step=position.step,
    )


def open_held_out(job: TrainingJob) -> HeldOut | HeldOutPairs | None:
    """What is measured while the phase trains: pairs where it trains on pairs, else documents where there are any."""
    if job.recipe.reads_pairs:
        return HeldOutPairs(job)
    return HeldOut(job) if job.validation else None


def train(training: Training, interruption: Interruption) -> None:
    """Step until the budget is spent or the run is interrupted; save at intervals and at the end. Raises SpikeError."""
    recipe, resources = training.job.recipe, training.job.resources
    while not training.is_done and not interruption.on_any_rank(training.trainable.device):
        plan, step = plan_step(recipe, training.position.num_tokens), training.position.step + 1
        if is_skipped(training.position.skipped, step):
            data, result = StepData([]), pass_over(recipe, plan, training.position.losses or NO_LOSSES)
        else:
            data, result = step_once(training, plan, step)
        is_taken = bool(data.micro_batches)
        training.position = _advance(training.position, recipe, plan, data, result)
        refuse_constant_rewards(recipe, training.position)
        measured = _measure(training) if is_due(recipe, plan) and training.held_out is not None else None
        if training.record is not None:
            if is_taken or data.metrics:
                training.record.taken(training.position, plan, data, result, measured)
            else:
                training.record.passed_over(training.position, measured)
        is_to_be_kept = recipe.validation.keep == "best" and measured is not None and training.position.best == measured
        if training.is_done:
            leave_best(training)
        if training.position.step % resources.save_interval_steps == 0 or training.is_done or is_to_be_kept:
            save(training)
    if training.saved_step != training.position.step:
        save(training)
    training.checkpoints.finish()


def step_once(training: Training, plan: StepPlan, step: int) -> tuple[StepData, StepResult]:
    """Read a step's data and take it, or pass it over where there is nothing to learn."""
    started = time.perf_counter()
    data, result = _read_and_take(training, plan, step)
    if "rollout_seconds" in data.metrics:
        started += sum(data.metrics[part] for part in SAMPLING_PARTS)
        data.metrics["training_seconds"] = time.perf_counter() - started
    return data, result


def _read_and_take(training: Training, plan: StepPlan, step: int) -> tuple[StepData, StepResult]:
    recipe = training.job.recipe
    waited_from = time.perf_counter()
    data = training.data.read(plan, training.position)
    if training.record is not None:
        training.record.waited(time.perf_counter() - waited_from)
    if not data.micro_batches:
        return data, pass_over(recipe, plan, NO_LOSSES)
    profiler = training.profiler
    with profiler.step(data.micro_batches) if profiler else nullcontext():
        observed = profiler.observed() if profiler else None
        recent = training.position.recent
        result = take_step(training.trainable, recipe, plan, data.micro_batches, step, recent, observed)
        for micro_batches in data.later_updates:
            result = take_step(training.trainable, recipe, plan, micro_batches(), step, recent).after(result)
        if training.trainable.critic is not None:
            data.metrics.update(update_critic(training.trainable.critic, recipe, plan, data.critic_updates, step))
        return data, result


def save(training: Training) -> None:
    """Write a checkpoint, which is uploaded while training goes on."""
    if training.record is not None:
        training.record.log_last()
    started = time.perf_counter()
    training.checkpoints.finish()
    job, position = training.job, training.position
    num_kept = job.resources.num_kept_checkpoints
    protected = on_first_rank(lambda: protected_steps(training.work_dir, job.recipe, position, num_kept))
    training.checkpoints.save(training.trainable, position, protected)
    training.saved_step = position.step
    if training.record is not None:
        training.record.paused(time.perf_counter() - started)


def leave_best(training: Training) -> None:
    """At the phase's end: the weights and moments of the best measurement, where the recipe keeps those. All ranks call
    it. Raises DamagedCheckpointError."""
    best = training.position.best
    if training.job.recipe.validation.keep != "best" or best is None or best.step == training.position.step:
        return
    training.checkpoints.finish()
    kept = load_checkpoint(training.trainable, checkpoint_dir_of(training.work_dir, best.step))
    policy = training.position.policy
    if policy is not None and kept.policy is not None:
        policy = policy.model_copy(update={"num_critic_updates": kept.policy.num_critic_updates})
    training.position = training.position.model_copy(
        update={
            "policy": policy,
            "optimizer_steps": kept.optimizer_steps,
            "torch_random_state": kept.torch_random_state,
            "weights_step": best.step,
        }
    )


def roll_back(training: Training, spike: Spike) -> None:
    """Keep the evidence of a spike and go back to a checkpoint from before the steps that are left out. Raises
    TooManySpikesError."""
    training.checkpoints.finish()
    recipe = training.job.recipe
    num_rollbacks = num_counted_rollbacks(recipe.spikes, training.position.skipped, spike.step)
    plan = plan_step(recipe, training.position.num_tokens)
    skipped = skipped_by(recipe.spikes, spike)
    is_rolled_back = num_rollbacks < recipe.spikes.max_rollbacks
    position = (
        f"rows {plan.first_row} to {plan.first_row + plan.num_rows - 1} of the phase, course position "
        f"{plan.start_tokens} tokens"
    )
    if dist.get_rank() == 0:
        evidence = {
            "first_row": plan.first_row,
            "last_row": plan.first_row + plan.num_rows - 1,
            "course_tokens": plan.start_tokens,
            "pieces": training.data.describe(plan, training.position),
        }
        record_spike(training.work_dir, spike, skipped, is_rolled_back, evidence)
        if is_rolled_back:
            print(
                f"step {spike.step}: {spike.reason}; {position}: back to before step {skipped.first_step}", flush=True
            )
            discard_checkpoints(training.work_dir, skipped.first_step - 1)
    wait_for_all()
    if not is_rolled_back:
        raise too_many_spikes(recipe.spikes, spike, num_rollbacks, position, training.work_dir)


def _measure(training: Training) -> Measurement:
    assert training.held_out is not None
    started = time.perf_counter()
    measured = training.held_out.measure(training.trainable, training.position.step)
    training.position = training.position.model_copy(
        update={"best": better(training.position.best, measured), "last": measured}
    )
    if training.record is not None:
        training.record.paused(time.perf_counter() - started)
    return measured


def _advance(
    position: Position, recipe: TrainingRecipe, plan: StepPlan, data: StepData, result: StepResult
) -> Position:
    is_taken, policy = bool(data.micro_batches), position.policy
    if policy is not None and "reward_mean" in data.metrics:
        policy = PolicyProgress(
            mean_rewards=(*policy.mean_rewards, data.metrics["reward_mean"]),
            num_constant_steps=0 if data.metrics["informative_groups"] else policy.num_constant_steps + 1,
            num_critic_updates=policy.num_critic_updates + len(data.critic_updates),
            num_refilled=dict(Counter(policy.num_refilled) + Counter(data.refilled)),
        )
    recent = (
        extend_window(recipe.spikes, position.recent, result.total_loss, result.grad_norm)
        if is_taken
        else position.recent
    )
    return position.model_copy(
        update={
            "step": position.step + 1,
            "num_tokens": position.num_tokens + plan.end_tokens - plan.start_tokens,
            "course_tokens": plan.end_tokens,
            "optimizer_steps": position.optimizer_steps + (1 + len(data.later_updates) if is_taken else 0),
            "torch_random_state": random_state_hex(),
            "losses": result.losses,
            "policy": policy,
            "recent": recent,
        }
    )


def train_to_end(job: TrainingJob, interruption: Interruption) -> Training:
    """Train until the budget is spent or the run is interrupted, over as many rollbacks as the recipe allows and from
    before every checkpoint that turns out to be damaged."""
    while True:
        training = None
        try:
            training = prepare(job)
            train(training, interruption)
            training.close()
            return training
        except SpikeError as error:
            assert training is not None, "only training spikes"
            roll_back(training, error.spike)
        except DamagedCheckpointError as error:
            if dist.get_rank() == 0:
                print(f"{error}: falling back to before it", flush=True)
                discard_checkpoints(Path(job.work_dir), error.step - 1)
            wait_for_all()
        if training is not None:
            training.close()
        del training
        gc.collect()  # the engine holds itself: without this two of them would be in memory


def run(job: TrainingJob) -> int:
    """Exit code of this rank."""
    configure_process(job.resources.device, job.recipe.num_threads, job.resources.deterministic)
    with onednn_products():
        training = train_to_end(job, Interruption())
    if not training.is_done:
        print(f"interrupted: saved at step {training.position.step}", flush=True)
        leave_together()
        return os.EX_TEMPFAIL
    export_checkpoint(job)
    if job.recipe.reads_pairs:
        leave_scores(job, training.trainable)
    leave_together()
    return 0


def main() -> int:
    job = TrainingJob.model_validate_json(Path(sys.argv[1]).read_bytes())
    try:
        return run(job)
    except STOPS as error:
        print(error, file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # all is written; Python's own end would free every object, for a second
