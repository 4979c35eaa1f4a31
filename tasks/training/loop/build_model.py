"""Builds this rank's part of a model: divided on the meta device, then given memory, then an optimizer and an engine.

All ranks divide the same model in the same way. Its weights are undefined until they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.schema import OptimizerRecipe, TrainingResources
from model.architecture.adapters import is_frozen
from model.architecture.transformer import Glm4Moe
from model.device import open_device
from model.optimizer.optimizer import build_optimizer
from tasks.training.parallel.compiled_layers import add_gradient, compile_layers
from tasks.training.parallel.deepspeed_config import deepspeed_config
from tasks.training.parallel.divided_scores import divide_scores
from tasks.training.parallel.expert_parallel import divide_experts
from tasks.training.parallel.gradients import leave_out_own_norm, sum_in_float32
from tasks.training.parallel.mixed_precision import ComputeInBfloat16
from tasks.training.parallel.partitions import pieces_of
from tasks.training.parallel.pipeline_parallel import PipelineStage, divide_stages
from tasks.training.parallel.ranks import DeepSpeedRanks, Ranks
from tasks.training.parallel.recompute import recompute_activations
from tasks.training.parallel.sequence_parallel import spread_sequence
from tasks.training.parallel.tensor_parallel import divide_matrices
from tasks.training.parallel.trainable import Trainable
from tasks.training.parallel.whole_matrices import WholeMatrices
from tasks.training.parallel.zero_partitions import ZeroPartitions


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
