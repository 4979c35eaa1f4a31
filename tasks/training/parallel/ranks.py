"""The position of this process on every axis of the topology, with one process group per axis.

Neighbouring ranks share the finest axis: tensor, then context, then data, then pipeline (Megatron's order, so that
tensor parallelism stays inside a node). Experts divide the tensor x context x data ranks of one pipeline stage:
`expert` are neighbours that divide a layer's experts, `expert_data` the ranks that hold the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from configs.schema import TrainingResources


@dataclass(frozen=True)
class Axis:
    """The ranks that differ in one coordinate only."""

    size: int
    rank: int
    ranks: tuple[int, ...]
    """Global ranks along the axis, this one among them."""
    group: ProcessGroup | None
    """May be None where the axis has one rank."""


@dataclass(frozen=True)
class Ranks:
    """The coordinates of this process."""

    tensor: Axis
    context: Axis
    data: Axis
    """Ranks that take different rows of a step."""
    pipeline: Axis
    """By stage, the first stage first."""
    pipeline_back: Axis
    """The same ranks in a second group, for gradients: on one NCCL communicator gradients and activations would wait
    for each other."""
    expert: Axis
    expert_data: Axis
    """Ranks that hold the same experts: over which their gradients are summed."""
    replicas: Axis
    """data x context: the ranks that hold the same dense weights and see different positions; what DeepSpeed calls data
    parallel."""
    stage: Axis
    """tensor x context x data: all ranks of this pipeline stage."""


def connect_ranks(resources: TrainingResources) -> Ranks:
    """Make the process groups; all ranks call it once, with the world that the topology was checked for."""
    tensor, context, pipeline = resources.tensor_parallel, resources.context_parallel, resources.pipeline_parallel
    world = dist.get_world_size()
    stage = world // pipeline
    data, experts = stage // (tensor * context), resources.expert_parallel
    assert world == tensor * context * data * pipeline and stage % experts == 0, (world, resources)

    def rank_of(p: int, d: int, c: int, t: int) -> int:
        return ((p * data + d) * context + c) * tensor + t

    every = [(p, d, c, t) for p in range(pipeline) for d in range(data) for c in range(context) for t in range(tensor)]
    stages = [[p * stage + index for index in range(stage)] for p in range(pipeline)]
    return Ranks(
        tensor=_axis(
            {tuple(rank_of(p, d, c, t) for t in range(tensor)) for p, d, c, _ in every}, is_for_deepspeed=True
        ),
        context=_axis({tuple(rank_of(p, d, c, t) for c in range(context)) for p, d, _, t in every}),
        data=_axis({tuple(rank_of(p, d, c, t) for d in range(data)) for p, _, c, t in every}),
        pipeline=_axis(lines := {tuple(rank_of(p, d, c, t) for p in range(pipeline)) for _, d, c, t in every}),
        pipeline_back=_axis(lines),
        expert=_axis(
            {tuple(ranks[first : first + experts]) for ranks in stages for first in range(0, stage, experts)},
            is_for_deepspeed=True,
        ),
        expert_data=_axis(
            {tuple(ranks[index::experts]) for ranks in stages for index in range(experts)}, is_for_deepspeed=True
        ),
        replicas=_axis(
            {tuple(rank_of(p, d, c, t) for d in range(data) for c in range(context)) for p, _, _, t in every},
            is_for_deepspeed=True,
        ),
        stage=_axis({tuple(ranks) for ranks in stages}),
    )


def _axis(lines: set[tuple[int, ...]], *, is_for_deepspeed: bool = False) -> Axis:
    """Each rank makes only its own group of an axis, and only the group's ranks wait for each other. All ranks make
    their groups in the order of the axes, so that no two wait for each other in different groups. Made by everyone, as
    torch does by default, 8,192 ranks would make thousands one after the other.

    DeepSpeed takes None for the whole world, so it gets a group even of one rank; where there is but one rank, the two
    are the same.
    """
    (ranks,) = (line for line in lines if dist.get_rank() in line)
    group = None
    if len(ranks) > 1 or (is_for_deepspeed and dist.get_world_size() > 1):
        group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert not isinstance(group, int), group  # NON_GROUP_MEMBER is for ranks outside
    return Axis(len(ranks), ranks.index(dist.get_rank()), ranks, group)


@dataclass(frozen=True)
class DeepSpeedRanks:
    """`mpu` of `deepspeed.initialize`: DeepSpeed averages gradients over, and divides its shards among, the
    replicas."""

    ranks: Ranks

    def get_data_parallel_group(self) -> ProcessGroup | None:
        return self.ranks.replicas.group

    def get_data_parallel_rank(self) -> int:
        return self.ranks.replicas.rank

    def get_data_parallel_world_size(self) -> int:
        return self.ranks.replicas.size

    def get_model_parallel_group(self) -> ProcessGroup | None:
        return self.ranks.tensor.group

    def get_model_parallel_rank(self) -> int:
        """0 on every rank: DeepSpeed takes from other ranks only parameters with a mark of Megatron's into its norm,
        which nothing reads, and in bfloat16 with ZeRO 1 it fails where there is none."""
        return 0

    def get_model_parallel_world_size(self) -> int:
        return self.ranks.tensor.size
