"""Maps a rank's parameters to the flat tensors that ZeRO's optimizer steps: which elements are where.

Without ZeRO the optimizer steps the parameters themselves. Stages 1 and 2 concatenate the parameters of a group and
give each rank one equal run of the whole. Stage 3 gives each rank an equal run of every parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.shards import shard_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `start + length` of a flattened parameter are `master[offset : offset + length]`."""

    parameter: nn.Parameter
    shape: torch.Size
    """Of the parameter on this rank before ZeRO divided it (stage 3 leaves an empty tensor)."""
    master: Tensor
    """What the optimizer steps, in float32: the parameter itself or a flat partition of several."""
    offset: int
    start: int
    length: int
    """0 where other ranks hold all of the parameter."""
    is_shared: bool
    """ZeRO divided it: other ranks hold elements of it too."""

    def of(self, flat: Tensor) -> Tensor:
        """A view of this piece's elements in a tensor that is laid out as `master` is."""
        return flat.view(-1).narrow(0, self.offset, self.length)

    def among(self, whole: Tensor) -> Tensor:
        """A view of this piece's elements in a tensor that is laid out as the parameter is."""
        return whole.reshape(-1).narrow(0, self.start, self.length)


def sharers(parameter: Tensor, ranks: Ranks) -> Axis:
    """The ranks among which ZeRO divides a parameter, or which hold equal copies of it."""
    shard = shard_of(parameter)
    return ranks.expert_data if shard is not None and shard.axis == "expert" else ranks.replicas


def pieces_of(engine: DeepSpeedEngine, model: nn.Module, ranks: Ranks) -> dict[nn.Parameter, Piece]:
    """The piece of every trained parameter, in the model's order; all ranks call it."""
    zero: Any = engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 0:
        pieces = (
            _piece(parameter, parameter.shape, parameter, 0, 0, parameter.numel()) for parameter in model.parameters()
        )
    else:
        pieces = _pieces_of_stage_3(zero) if stage == 3 else _pieces_of_stage_2(zero, ranks)
    by_id = {id(piece.parameter): piece for piece in pieces}
    return {parameter: by_id[id(parameter)] for parameter in model.parameters() if parameter.requires_grad}


def frozen_pieces_of(engine: DeepSpeedEngine, model: nn.Module) -> dict[nn.Parameter, Piece]:
    """The piece of every frozen parameter. No optimizer steps it, so it is its own master; ZeRO 3 divides it too."""
    frozen: list[Any] = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if engine.zero_optimization_stage() < 3:
        return {each: _piece(each, each.shape, each, 0, 0, each.numel()) for each in frozen}
    return {each: _piece_of_stage_3(each, each.ds_tensor, 0) for each in frozen}


def _piece(
    parameter: nn.Parameter,
    shape: torch.Size,
    master: Tensor,
    offset: int,
    start: int,
    length: int,
    *,
    is_shared: bool = False,
):
    return Piece(parameter, shape, master, offset, start, length, is_shared)


def _pieces_of_stage_2(zero: Any, ranks: Ranks) -> Iterator[Piece]:
    groups: list[list[nn.Parameter]] = zero.bf16_groups if _keeps_bfloat16(zero) else zero.round_robin_bit16_groups
    for parameters, master in zip(groups, _masters(zero, 2), strict=True):
        addresses = [_address(parameter) for parameter in parameters]
        lengths = torch.tensor([length for _, _, length in addresses], device=master.device)
        axis = sharers(parameters[0], ranks)
        if axis.group is not None:
            dist.all_reduce(lengths, op=dist.ReduceOp.MAX, group=axis.group)
        for parameter, (offset, start, length), longest in zip(parameters, addresses, lengths.tolist(), strict=True):
            yield _piece(
                parameter, parameter.shape, master, offset, start, length, is_shared=longest < parameter.numel()
            )


def _keeps_bfloat16(zero: Any) -> bool:
    """DeepSpeed has an optimizer of its own for stage 1 with bfloat16 weights and float32 gradients."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    return isinstance(zero, BF16_Optimizer)


def _masters(zero: Any, stage: int) -> list[Tensor]:
    if stage == 3:
        return zero.fp32_partitioned_groups_flat
    return zero.fp32_groups_flat_partition if _keeps_bfloat16(zero) else zero.single_partition_of_fp32_groups


def _gradients(zero: Any, stage: int, group: int, master: Tensor) -> list[Tensor]:
    """Gradients one after the other, in the order of the master's elements."""
    if _keeps_bfloat16(zero):
        return [zero.fp32_groups_gradient_flat_partition[group]]
    is_offloaded = zero.offload_optimizer if stage == 3 else zero.cpu_offload
    if is_offloaded:
        assert master.grad is not None, group
        return [master.grad]
    return zero.averaged_gradients[group]


def _address(parameter: Any) -> tuple[int, int, int]:
    """Offset in the partition, start in the parameter, length."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return 0, 0, 0
    there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
    return int(there.start), int(here.start), int(here.numel)


def _pieces_of_stage_3(zero: Any) -> Iterator[Piece]:
    for group, parameters in enumerate(zero.fp16_groups):
        offset = 0
        for parameter in parameters:
            yield _piece_of_stage_3(parameter, zero.fp32_partitioned_groups_flat[group], offset)
            offset += int(parameter.ds_tensor.ds_numel)


def _piece_of_stage_3(parameter: Any, master: Tensor, offset: int) -> Piece:
    rank, size = dist.get_rank(parameter.ds_process_group), int(parameter.ds_tensor.ds_numel)
    length = max(0, min(size, parameter.ds_numel - rank * size))
    is_shared = dist.get_world_size(parameter.ds_process_group) > 1
    return _piece(parameter, parameter.ds_shape, master, offset, rank * size, length, is_shared=is_shared)


def gradient_pieces(engine: DeepSpeedEngine, pieces: dict[nn.Parameter, Piece]) -> Iterator[tuple[Piece, Tensor]]:
    """This rank's elements of the averaged gradients of a step, after the backward pass that ended it; views."""
    zero: Any = engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 0:
        yield from (
            (piece, piece.parameter.grad.view(-1)) for piece in pieces.values() if piece.parameter.grad is not None
        )
        return
    gradients = {
        id(master): _gradients(zero, stage, group, master) for group, master in enumerate(_masters(zero, stage))
    }
    for piece in pieces.values():
        offset = 0
        # A piece is within one of them.
        for gradient in gradients[id(piece.master)]:
            assert gradient is not None, piece.shape
            if offset <= piece.offset < offset + gradient.numel() and piece.length:
                yield piece, gradient.reshape(-1).narrow(0, piece.offset - offset, piece.length)
            offset += gradient.numel()
