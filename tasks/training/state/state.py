"""The hand-over state: everything that training continues from, under checkpoint names, for any ranks and engine.

Files: master-NNNNN.safetensors (float32 weights and router biases), momentum-NNNNN (Muon), first_moment-NNNNN and
second_moment-NNNNN (AdamW), state.json (position, counters, random state). Each pipeline stage writes files of its
own numbers. A phase's hand-over and its own checkpoints have the same format. Tensors on disk are whole. A rank reads
what it holds of them and writes what it was given to write, one tensor at a time. The files of a policy's critic begin
with `critic-`. Where only an adapter is trained,
the files hold the adapter; the frozen weights stay in the files that they came from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn

from model.architecture.adapters import is_frozen
from model.formats.checkpoint_names import checkpoint_names, to_checkpoint_tensors
from tasks.training.parallel.partitions import Piece, assemble, frozen_pieces_of, pieces_of, sharers
from tasks.training.parallel.ranks import Ranks
from tasks.training.parallel.shards import axis_of, gather_whole, own_part, shard_of, whole_shape
from tasks.training.state.position import Position
from tasks.training.state.tensor_sources import StateFiles, TensorSource
from tasks.training.state.unreached_tensors import FIRST_MOMENTS, UNREACHED

if TYPE_CHECKING:
    from tasks.training.parallel.trainable import Trainable

STATE_FILE = "state.json"
MAX_SHARD_BYTES = 1 << 30
MASTER_BYTES = 4
_NUMBERS_PER_STAGE = 1000
"""File numbers of a pipeline stage: it may have this many shards of a kind."""
CRITIC = "critic-"
"""What the names of a critic's files begin with."""
_OPTIMIZER_KINDS = {"momentum": "momentum_buffer", "first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
"""File name -> name in the optimizer's per-parameter state."""


def dump_state(trainable: Trainable, position: Position) -> Iterator[tuple[str, bytes]]:
    """File names and bytes of this rank's files of the hand-over state, one file in memory at a time. Equal state,
    equal tensors.

    All ranks exhaust it together, as parts are brought together on the way; the first rank of each pipeline stage
    yields its files, the others none.
    """
    yield from _dump_tensors(trainable, "")
    if trainable.critic is not None:
        yield from _dump_tensors(trainable.critic, CRITIC)
    if dist.get_rank() == 0:
        yield STATE_FILE, (position.model_dump_json(indent=1) + "\n").encode()


def _dump_tensors(trainable: Trainable, prefix: str) -> Iterator[tuple[str, bytes]]:
    first_number = trainable.ranks.pipeline.rank * _NUMBERS_PER_STAGE + 1
    for kind in ("master", *_OPTIMIZER_KINDS):
        for number, shard in enumerate(_shards(_whole_tensors(trainable, kind)), start=first_number):
            yield f"{prefix}{kind}-{number:05d}.safetensors", save(shard, _described(shard, kind))


@torch.no_grad()
def _whole_tensors(trainable: Trainable, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names and tensors on the first rank of the pipeline stage; the others only take part."""
    model, ranks, device = trainable.model, trainable.ranks, trainable.engine.device
    assert device is not None
    pieces = pieces_of(trainable.engine, model, ranks)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, piece in pieces.items():
        if kind != "master" and (kind == "momentum") != trainable.optimizer.has_momentum(parameter):
            continue
        part = piece.of(_flat_state(trainable, piece, kind))
        axis = sharers(parameter, ranks)
        whole = assemble(part, piece, axis, device, to=0)
        if axis.rank == 0:  # the first of the sharers hold all the parts together
            whole = gather_whole(whole, shard_of(parameter), ranks)
        if ranks.stage.rank == 0:
            yield from to_checkpoint_tensors({names[parameter]: whole}).items()
    if kind == "master" and ranks.stage.rank == 0 and not is_frozen(model):
        yield from router_biases(model).items()


def router_biases(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a checkpoint, by name."""
    kept = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _flat_state(trainable: Trainable, piece: Piece, kind: str) -> Tensor:
    if kind == "master":
        return piece.master
    state = trainable.optimizer.ensure_state(piece.master, use_muon=kind == "momentum")
    return state[_OPTIMIZER_KINDS[kind]]


def _described(shard: dict[str, Tensor], kind: str) -> dict[str, str] | None:
    """Metadata of a file: of the first moments those tensors that are zero throughout, which no gradient reached."""
    if kind not in FIRST_MOMENTS:
        return None
    unreached = sorted(name for name, tensor in shard.items() if not tensor.any())
    return {UNREACHED: json.dumps(unreached)} if unreached else None


def read_position(state_dir: Path) -> Position:
    return Position.model_validate_json((state_dir / STATE_FILE).read_bytes())


@torch.no_grad()
def load_state(trainable: Trainable, state_dir: Path, position: Position) -> None:
    """Load weights, router biases, momentum, moments and the random state, but no critic. Raises ValueError for another
    architecture or kind of optimizer."""
    _load_tensors(trainable, state_dir, "", position.optimizer_steps)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(position.torch_random_state), dtype=torch.uint8))


@torch.no_grad()
def load_critic(critic: Trainable, state_dir: Path, position: Position) -> None:
    """Load the critic that a policy's checkpoint holds."""
    assert position.policy is not None, state_dir
    _load_tensors(critic, state_dir, CRITIC, position.policy.num_critic_updates)


def _load_tensors(trainable: Trainable, state_dir: Path, prefix: str, num_updates: int) -> None:
    load_master(trainable, StateFiles(state_dir, f"{prefix}master"), str(state_dir))
    names = {parameter: name for name, parameter in trainable.model.named_parameters()}
    pieces = pieces_of(trainable.engine, trainable.model, trainable.ranks)
    for kind in _OPTIMIZER_KINDS:
        source = StateFiles(state_dir, f"{prefix}{kind}")
        held = source.names()
        for parameter, piece in pieces.items():
            ours = (kind == "momentum") == trainable.optimizer.has_momentum(parameter)
            is_there = checkpoint_names(names[parameter], _num_experts(parameter, piece, trainable))[0] in held
            if is_there and not ours:
                raise ValueError(
                    f"{state_dir} holds the {kind} of {names[parameter]}, which another optimizer.kind updated: "
                    f"phases of one course "
                    "share the kind"
                )
            if not ours:
                continue
            state = trainable.optimizer.ensure_state(piece.master, use_muon=kind == "momentum")
            if is_there:
                _fill(
                    [(piece.of(state[_OPTIMIZER_KINDS[kind]]), piece.start)], source, names[parameter], piece, trainable
                )
            else:  # no step was taken yet
                piece.of(state[_OPTIMIZER_KINDS[kind]]).zero_()
            if kind == "first_moment":
                state["step"] = num_updates


@torch.no_grad()
def load_master(trainable: Trainable, source: TensorSource, described: str) -> None:
    """Load only the trained weights, and the router biases where all weights are trained: a start on another course
    begins with fresh moments."""
    model = trainable.model
    pieces = pieces_of(trainable.engine, model, trainable.ranks)
    _load(trainable, pieces, {} if is_frozen(model) else router_biases(model), source, described)


@torch.no_grad()
def load_frozen(trainable: Trainable, source: TensorSource, described: str) -> None:
    """Load what an adapter's phase does not train, router biases too."""
    model = trainable.model
    _load(trainable, frozen_pieces_of(trainable.engine, model), router_biases(model), source, described)


def _load(
    trainable: Trainable,
    pieces: dict[nn.Parameter, Piece],
    buffers: dict[str, Tensor],
    source: TensorSource,
    described: str,
) -> None:
    names = {parameter: name for name, parameter in trainable.model.named_parameters()}
    wanted = {
        each
        for parameter, piece in pieces.items()
        for each in _whole_names(names[parameter], parameter, piece, trainable)
    }
    wanted = _over_stages(wanted | set(buffers), trainable.ranks)
    for name in sorted(wanted ^ source.names()):
        owner = "the model" if name in wanted else described
        raise ValueError(f"tensor {name} is only in {owner}: start from a phase of the same architecture")
    stage = trainable.engine.zero_optimization_stage()
    for parameter, piece in pieces.items():
        targets = [(piece.of(piece.master.detach()), piece.start), *_computed_with(parameter, piece, stage)]
        _fill(targets, source, names[parameter], piece, trainable)
    for name, buffer in buffers.items():
        buffer.copy_(source.read(name, buffer.shape))


def _computed_with(parameter: nn.Parameter, piece: Piece, stage: int) -> list[tuple[Tensor, int]]:
    """The tensors that the model computes with, where these are not the master itself: flat, each with the number of
    its first element."""
    if piece.master is parameter:
        return []
    whole = [(parameter.data.view(-1), 0)]
    if stage < 3:
        return whole
    shared: Tensor = parameter.ds_tensor  # pyright: ignore[reportAttributeAccessIssue]
    # Small parameters stay whole on every rank.
    return [(shared.view(-1)[: piece.length], piece.start), *(whole if parameter.numel() else [])]


def _fill(
    targets: list[tuple[Tensor, int]], source: TensorSource, name: str, piece: Piece, trainable: Trainable
) -> None:
    """Copy into each target the elements that it holds of a tensor as this rank held it before ZeRO divided it."""
    first, stop = min(start for _, start in targets), max(start + target.numel() for target, start in targets)
    for offset, run in _read_runs(source, name, piece, trainable, first, stop):
        for target, start in targets:
            low, high = max(offset, start), min(offset + run.numel(), start + target.numel())
            if low < high:
                target[low - start : high - start].copy_(run[low - offset : high - offset])


def _read_runs(
    source: TensorSource, name: str, piece: Piece, trainable: Trainable, first: int, stop: int
) -> Iterator[tuple[int, Tensor]]:
    """Runs of elements that cover `first` to `stop`, flat, each with the offset at which it begins. Of stacked experts
    one at a time is in memory, and those of other ranks are not read."""
    ranks, shard = trainable.ranks, shard_of(piece.parameter)
    names = _whole_names(name, piece.parameter, piece, trainable)
    whole = whole_shape(piece.parameter, piece.shape, ranks)
    if names == [name]:
        yield 0, own_part(source.read(name, whole), shard, ranks).reshape(-1)
        return
    if shard is not None and shard.dim == 0:
        first_expert = axis_of(shard, ranks).rank * piece.shape[0]
        names, shard = names[first_expert : first_expert + piece.shape[0]], None
    num_elements = piece.shape[1:].numel()
    for offset, each in zip(range(0, piece.shape.numel(), num_elements), names, strict=True):
        if offset < stop and offset + num_elements > first:
            yield (
                offset,
                own_part(source.read(each, whole[1:]), shard and replace(shard, dim=shard.dim - 1), ranks).reshape(-1),
            )


def _whole_names(name: str, parameter: nn.Parameter, piece: Piece, trainable: Trainable) -> list[str]:
    return checkpoint_names(name, _num_experts(parameter, piece, trainable))


def _num_experts(parameter: nn.Parameter, piece: Piece, trainable: Trainable) -> int:
    return whole_shape(parameter, piece.shape, trainable.ranks)[0]


def _over_stages(names: set[str], ranks: Ranks) -> set[str]:
    if ranks.pipeline.size == 1:
        return names
    lists: list[set[str]] = [set()] * ranks.pipeline.size
    dist.all_gather_object(lists, names, group=ranks.pipeline.group)
    return set().union(*lists)


def random_state_hex() -> str:
    return torch.get_rng_state().numpy().tobytes().hex()


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * MASTER_BYTES
        if shard and filled + size > MAX_SHARD_BYTES:
            yield shard
            shard, filled = {}, 0
        # A copy: without ZeRO these are views of what the next step changes.
        shard[name] = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        filled += size
    if shard:
        yield shard
