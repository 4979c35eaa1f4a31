"""From a job to a model, an optimizer and an engine at the position where the run stands, on any topology; and back to disk.

Order matters: all ranks build the same model from the same seed, load whole tensors, and only then keep their part of it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch.distributed as dist

from configs.schema import PolicyObjective
from model.optimizer import build_optimizer
from model.transformer import Glm4Moe
from tasks.training.checkpoints import commit_checkpoint, find_checkpoint
from tasks.training.deepspeed_config import deepspeed_config
from tasks.training.job import TrainingJob
from tasks.training.launch_rules import refuse_impossible_training
from tasks.training.mixed_precision import ComputeInBfloat16
from tasks.training.ranks import DeepSpeedRanks, connect_ranks
from tasks.training.recompute import recompute_activations
from tasks.training.state import PolicyProgress, Position, dump_state, load_master, load_state, random_state_hex, read_position
from tasks.training.training_step import Trainable


def prepare_training(job: TrainingJob) -> tuple[Trainable, Position]:
    """Model, optimizer, state and engine at the position where the run stands."""
    import deepspeed

    recipe, resources = job.recipe, job.resources
    refuse_impossible_training(recipe, resources)
    ranks = connect_ranks(resources)
    model = Glm4Moe(recipe.model, rope_theta=recipe.rope_theta)
    # Here the model is divided: tensor_parallel.divide_matrices, expert_parallel.divide_experts, sequence_parallel.spread_sequence.
    recompute_activations(model, resources.recompute, resources.recompute_every_layers)
    optimizer = build_optimizer(model, recipe.optimizer)
    module = ComputeInBfloat16(model) if recipe.dtype == "bfloat16" else model
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=deepspeed_config(resources),
        mpu=DeepSpeedRanks(ranks) if dist.get_world_size() > 1 else None,
    )  # fmt: skip
    # Alone, a rank would only copy its gradients to and fro.
    engine.enable_backward_allreduce = ranks.replicas.size > 1
    trainable = Trainable(engine, model, optimizer, ranks)
    return trainable, restore_state(job, trainable)


def restore_state(job: TrainingJob, trainable: Trainable) -> Position:
    """The newest verified checkpoint of this run, else the start state, else random weights."""
    recipe, model, optimizer = job.recipe, trainable.model, trainable.optimizer
    checkpoint_dir, problems = find_checkpoint(Path(job.work_dir))
    for problem in problems:
        print(f"{problem}: falling back to {checkpoint_dir or 'the start of the phase'}", flush=True)
    if checkpoint_dir is not None:
        position = read_position(checkpoint_dir)
        load_state(model, optimizer, checkpoint_dir, position)
        return position
    fresh = Position(
        course=recipe.course.name, phase=recipe.phase, step=0, num_tokens=0, course_tokens=recipe.course_start_tokens,
        optimizer_steps=0, torch_random_state=random_state_hex(), losses=None,
        policy=PolicyProgress(mean_rewards=(), num_constant_steps=0) if isinstance(recipe.objective, PolicyObjective) else None,
    )  # fmt: skip
    if not job.start_dir:
        return fresh
    before = read_position(Path(job.start_dir))
    if before.course != recipe.course.name:
        load_master(model, Path(job.start_dir))
        return fresh
    assert before.course_tokens == recipe.course_start_tokens, (before, recipe.course_start_tokens)  # train_phase refused anything else
    load_state(model, optimizer, Path(job.start_dir), before)
    return fresh.model_copy(update={"optimizer_steps": before.optimizer_steps, "torch_random_state": before.torch_random_state})


def save_state(job: TrainingJob, trainable: Trainable, position: Position, protected_steps: Collection[int] = ()) -> None:
    """Commit a checkpoint; all ranks call it. Retention leaves those of the protected steps."""
    if dist.get_rank() == 0:
        files = dump_state(trainable.model, trainable.optimizer, position)
        commit_checkpoint(Path(job.work_dir), position.step, files, job.resources.num_kept_checkpoints, protected_steps)
    dist.barrier()
