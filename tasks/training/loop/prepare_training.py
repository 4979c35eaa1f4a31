"""Builds model, optimizer and engine of a job at the run's position, on any topology.

Order matters: all ranks build the same model from the same seed, load whole tensors, and only then keep their part of
it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from configs.schema import DpoObjective, PolicyObjective, PpoObjective
from model.architecture.adapters import add_adapters
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes
from model.formats.hf_checkpoint import is_reward_model, read_config
from tasks.training.loop.build_model import build_trainable, divide_model, make_weights
from tasks.training.loop.critic_training import start_critic
from tasks.training.loop.pair_scores import keep_reference
from tasks.training.parallel.compiled_layers import refuse_wrong_gradients
from tasks.training.parallel.control import on_first_rank
from tasks.training.parallel.ranks import Ranks, connect_ranks
from tasks.training.parallel.trainable import Trainable
from tasks.training.plan.launch_rules import refuse_impossible_training
from tasks.training.schedule.schedules import rests_mtp
from tasks.training.state.continuation import find_continuation
from tasks.training.state.initial_weights import InitialWeights
from tasks.training.state.job import TrainingJob
from tasks.training.state.node_checkpoints import finish_uploads
from tasks.training.state.position import PolicyProgress, Position
from tasks.training.state.state import (
    load_checkpoint,
    load_frozen,
    load_handover,
    load_master,
    random_state_hex,
    read_position,
)
from tasks.training.state.tensor_sources import FreshAdapters, RewardModelStart, TensorSource, open_weights


def prepare_training(job: TrainingJob) -> tuple[Trainable, Position]:
    """Model, optimizer, state and engine at the run's present position."""
    recipe, resources = job.recipe, job.resources
    refuse_impossible_training(recipe, resources)
    ranks = connect_ranks(resources)
    if isinstance(recipe.objective, DpoObjective):
        keep_reference(job, ranks)
    with torch.device("meta"):
        model = Glm4Moe(recipe.model, rope_theta=recipe.rope_theta, is_scored=recipe.is_scored)
        add_adapters(model, recipe.adapter, recipe.seed)
    shapes = checkpoint_shapes(model)
    divide_model(model, ranks, resources)
    make_weights(model, recipe.dtype, resources, ranks)
    trainable = build_trainable(model, recipe.optimizer, recipe.dtype, resources, ranks, rests_mtp(recipe))
    if isinstance(recipe.objective, PpoObjective):
        trainable = replace(trainable, critic=_build_critic(job, ranks))
    position = restore_state(job, trainable, shapes)
    if resources.compile_layers:
        refuse_wrong_gradients(model, resources.micro_batch_sequences, recipe.sequence_length)
    return trainable, position


def _build_critic(job: TrainingJob, ranks: Ranks) -> Trainable:
    """The critic with its optimizer and engine; its weights are undefined until they are restored. Where a reward model
    is its start, its RoPE base is that of the reward model, whose values it would not have with the policy's."""
    recipe, resources, judge_dir = job.recipe.critic_recipe, job.resources, job.reward_model_dir
    rope_theta = read_config(Path(judge_dir)).rope_theta if judge_dir else recipe.rope_theta
    with torch.device("meta"):
        critic = Glm4Moe(recipe.model, rope_theta=rope_theta, is_scored=True)
    divide_model(critic, ranks, resources)
    make_weights(critic, recipe.dtype, resources, ranks)
    return build_trainable(critic, recipe.optimizer, recipe.dtype, resources, ranks)


def restore_state(job: TrainingJob, trainable: Trainable, shapes: dict[str, torch.Size]) -> Position:
    """The newest checkpoint of this run, else the start state, else random weights. `shapes` are those of the undivided
    model's tensors, under checkpoint names. Raises DamagedCheckpointError on all ranks."""
    recipe = job.recipe
    finish_uploads(job)
    checkpoint_dir, problems = on_first_rank(lambda: find_continuation(Path(job.work_dir)))
    for problem in problems:
        if dist.get_rank() == 0:
            print(f"{problem}: falling back to {checkpoint_dir or 'the start of the phase'}", flush=True)
    start = _open_start(job, shapes) if job.start_dir else None
    described = f"the state in {job.start_dir}"
    if recipe.adapter.kind != "none":
        assert start is not None, "train_phase refused adapters without weights"
        load_frozen(trainable, start, described)
    if checkpoint_dir is not None:
        return load_checkpoint(trainable, checkpoint_dir)
    fresh = Position(
        course=recipe.course.name,
        phase=recipe.phase,
        step=0,
        num_tokens=0,
        course_tokens=recipe.course_start_tokens,
        optimizer_steps=0,
        torch_random_state=random_state_hex(),
        losses=None,
        policy=PolicyProgress(mean_rewards=(), num_constant_steps=0)
        if isinstance(recipe.objective, PolicyObjective)
        else None,
    )
    if trainable.critic is not None:
        start_critic(job, trainable.critic)
    if start is None:
        load_master(trainable, InitialWeights(recipe.model, shapes, recipe.seed), "the initial weights")
        return fresh
    before = read_position(Path(job.start_dir))
    if recipe.adapter.kind != "none":
        load_master(trainable, FreshAdapters(shapes, start, recipe.seed), "the fresh adapters")
        return fresh
    if before.course != recipe.course.name:
        load_master(trainable, start, described)
        return fresh
    assert before.course_tokens == recipe.course_start_tokens, (
        before,
        recipe.course_start_tokens,
    )  # train_phase refused anything else
    load_handover(trainable, Path(job.start_dir), before)
    return fresh.model_copy(
        update={"optimizer_steps": before.optimizer_steps, "torch_random_state": before.torch_random_state}
    )


def _open_start(job: TrainingJob, shapes: dict[str, torch.Size]) -> TensorSource:
    state_dir, weights_dir, recipe = Path(job.start_dir), Path(job.start_weights_dir), job.recipe
    if not recipe.is_scored or is_reward_model(weights_dir):
        return open_weights(state_dir, weights_dir, recipe.model)
    language_model = open_weights(state_dir, weights_dir, read_config(weights_dir))
    return RewardModelStart(shapes, language_model, recipe.model, recipe.seed)
