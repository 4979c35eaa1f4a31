"""Builds model, optimizer and engine of a job at the run's position, on any topology.

Order matters: all ranks build the same model from the same seed, load whole tensors, and only then keep their part of
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.schema import OptimizerRecipe, PolicyObjective, PpoObjective, TrainingResources
from model.architecture.adapters import add_adapters, is_frozen
from model.architecture.transformer import Glm4Moe
from model.device import open_device
from model.formats.checkpoint_names import checkpoint_shapes
from model.formats.hf_checkpoint import is_reward_model, read_config
from model.optimizer.optimizer import build_optimizer
from tasks.training.loop.critic_training import start_critic
from tasks.training.parallel.compiled_layers import add_gradient, compile_layers, refuse_wrong_gradients
from tasks.training.parallel.control import on_first_rank
from tasks.training.parallel.deepspeed_config import deepspeed_config
from tasks.training.parallel.divided_scores import divide_scores
from tasks.training.parallel.expert_parallel import divide_experts
from tasks.training.parallel.gradients import leave_out_own_norm, sum_in_float32
from tasks.training.parallel.mixed_precision import ComputeInBfloat16
from tasks.training.parallel.partitions import pieces_of
from tasks.training.parallel.pipeline_parallel import PipelineStage, divide_stages
from tasks.training.parallel.ranks import DeepSpeedRanks, Ranks, connect_ranks
from tasks.training.parallel.recompute import recompute_activations
from tasks.training.parallel.sequence_parallel import spread_sequence
from tasks.training.parallel.tensor_parallel import divide_matrices
from tasks.training.parallel.trainable import Trainable
from tasks.training.parallel.whole_matrices import WholeMatrices
from tasks.training.parallel.zero_partitions import ZeroPartitions
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


def divide_model(model: Glm4Moe, ranks: Ranks, resources: TrainingResources) -> None:
    """Change a whole model in place into the part that this rank holds and computes."""
    spread_sequence(model, ranks)
    divide_scores(model, ranks)
    divide_matrices(model, ranks)
    divide_experts(model, ranks, is_overlapped=resources.overlap_shared_expert)
    divide_stages(model, ranks)
    if resources.compile_layers:
        compile_layers(model)
    recompute_activations(model, resources.recompute, resources.recompute_every_layers)
    if is_frozen(model) and ranks.pipeline.rank == 0:
        # ZeRO 3 gathers a layer's weights for its backward pass only where its input has a gradient.
        model.model.embed_tokens.register_forward_hook(_require_gradient)


def _require_gradient(module: nn.Module, arguments: object, hidden_BTD: Tensor) -> None:
    if torch.is_grad_enabled():
        hidden_BTD.requires_grad_()


def make_weights(
    model: nn.Module, dtype: Literal["float32", "bfloat16"], resources: TrainingResources, ranks: Ranks
) -> None:
    """Memory for a divided model on the rank's device. ZeRO 3 divides each parameter before the next has any."""
    device, computed = open_device(resources.device), getattr(torch, dtype)
    if resources.zero_stage == 3:
        materialize(model, device, computed, computed, ZeroPartitions(resources, dtype, ranks).divide)
    else:
        materialize(model, device, frozen_dtype=computed)


def materialize(
    model: nn.Module,
    device: torch.device,
    frozen_dtype: torch.dtype = torch.float32,
    trained_dtype: torch.dtype = torch.float32,
    divide: Callable[[nn.Parameter], None] = lambda parameter: None,
) -> None:
    """Give tensors on the meta device memory of undefined content; what is marked on parameters stays. Frozen ones have
    no float32 master. `divide` is called with each as soon as it has memory."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dtype = trained_dtype if parameter.requires_grad else frozen_dtype
            real = nn.Parameter(torch.empty_like(parameter, device=device, dtype=dtype), parameter.requires_grad)
            vars(real).update(vars(parameter))
            setattr(module, name, real)
            divide(real)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))


def build_trainable(
    model: Glm4Moe,
    optimizer_recipe: OptimizerRecipe,
    dtype: Literal["float32", "bfloat16"],
    resources: TrainingResources,
    ranks: Ranks,
    rests_mtp: bool = False,
) -> Trainable:
    """Optimizer and engine around a divided model. Masters are float32 whatever the model computes in. `rests_mtp`:
    steps may leave the MTP layer as it is."""
    import deepspeed

    optimizer = build_optimizer(model, optimizer_recipe, rests_mtp)
    module = PipelineStage(model, ranks) if ranks.pipeline.size > 1 else model
    module = ComputeInBfloat16(module) if dtype == "bfloat16" and resources.zero_stage == 0 else module
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config=deepspeed_config(resources, dtype),
        mpu=DeepSpeedRanks(ranks) if dist.get_world_size() > 1 else None,
    )
    if resources.zero_stage == 0:  # a single rank would only copy its gradients to and fro
        engine.enable_backward_allreduce = ranks.replicas.size > 1 or ranks.expert_data.size > 1
    elif resources.zero_stage == 1 and dtype == "bfloat16":
        sum_in_float32(engine, add_gradient if resources.compile_layers else Tensor.add_)
        leave_out_own_norm(engine)
    assert engine.device is not None
    optimizer.orthogonalize = WholeMatrices(optimizer, pieces_of(engine, model, ranks), ranks, engine.device)
    return Trainable(engine, model, ranks, optimizer)


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
