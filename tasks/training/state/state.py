"""The state that training continues from, under checkpoint names, for any ranks and engine.

Kinds of tensors: master (float32 weights and router biases), momentum (Muon), first_moment and second_moment (AdamW);
those of a policy's critic begin with `critic-`. Beside them is the position (state.json). Where only an adapter is
trained, its tensors are the state; the frozen weights stay in the files that they came from.

A checkpoint is what each rank holds, once (own_runs.py, saved_state.py). A phase's hand-over has whole tensors in files
(export.py). Both are read the same way: a rank reads its own range of a parameter, and the ranks that need more of it
exchange what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.architecture.adapters import is_frozen
from model.architecture.four_bit import FourBitMatrices
from model.architecture.four_bit_layers import four_bit_matrices
from model.formats.checkpoint_names import checkpoint_names
from tasks.training.parallel.control import gathered, on_first_rank
from tasks.training.parallel.partitions import Piece, frozen_pieces_of, pieces_of
from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.shards import whole_shape
from tasks.training.state.checkpoints import DamagedCheckpointError, SavedFile, find_missing, read_index
from tasks.training.state.own_runs import holders, own_range, runs_of, windows
from tasks.training.state.position import Position
from tasks.training.state.saved_state import STATE_FILE, SavedState, SavedTensors
from tasks.training.state.tensor_runs import Run, whole_run
from tasks.training.state.tensor_sources import StateFiles, TensorSource

if TYPE_CHECKING:
    from tasks.training.parallel.trainable import DividedModel, Trainable

CRITIC = "critic-"
"""What the kinds of a critic's tensors begin with."""
_OPTIMIZER_KINDS = {"momentum": "momentum_buffer", "first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
"""Kind -> name in the optimizer's per-parameter state."""
OpenKind = Callable[[str], TensorSource]
"""The tensors of a kind."""


@dataclass(frozen=True)
class Snapshot:
    """A copy in host memory of what one rank writes of a state: training may go on."""

    runs: tuple[tuple[str, Run], ...]
    """Kind and place of the elements, in the order in which they follow each other in `elements`."""
    elements: Tensor
    """Float32, flat."""
    position: bytes
    """state.json."""


@torch.no_grad()
def take_snapshot(trainable: Trainable, position: Position) -> Snapshot:
    """No rank waits for another. Equal state, equal snapshot on equal topologies."""
    parts = list(_own_parts(trainable, ""))
    if trainable.critic is not None:
        parts += _own_parts(trainable.critic, CRITIC)
    return _copied(parts, (position.model_dump_json(indent=1) + "\n").encode())


@torch.no_grad()
def take_weights(trainable: Trainable) -> Snapshot:
    """As `take_snapshot`, but only of masters, without a position."""
    return _copied([part for part in _own_parts(trainable, "", ("master",))], b"")


def _copied(parts: Sequence[tuple[str, Run, Tensor]], position: bytes) -> Snapshot:
    elements, offset = torch.empty(sum(run.length for _, run, _ in parts)), 0
    for _, run, values in parts:
        elements[offset : offset + run.length].copy_(values)
        offset += run.length
    return Snapshot(tuple((kind, run) for kind, run, _ in parts), elements, position)


def _own_parts(
    trainable: Trainable, prefix: str, kinds: Sequence[str] = ("master", *_OPTIMIZER_KINDS)
) -> Iterator[tuple[str, Run, Tensor]]:
    """Kind, place and values of what this rank writes; the values are views."""
    model, ranks = trainable.model, trainable.ranks
    pieces = pieces_of(trainable.engine, model, ranks)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for kind in kinds:
        for parameter, piece in pieces.items():
            if kind != "master" and (kind == "momentum") != trainable.optimizer.has_momentum(parameter):
                continue
            part, position = piece.of(_flat_state(trainable, piece, kind)), own_range(piece, ranks)[0]
            for run in runs_of(names[parameter], piece, *own_range(piece, ranks), ranks):
                yield f"{prefix}{kind}", run, part.narrow(0, position - piece.start, run.length)
                position += run.length
    if ranks.stage.rank == 0 and not is_frozen(model):
        for name, buffer in router_biases(model).items():
            yield f"{prefix}master", whole_run(name, buffer.shape), buffer.reshape(-1)


def router_biases(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a checkpoint, by name."""
    kept = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _flat_state(trainable: Trainable, piece: Piece, kind: str) -> Tensor:
    if kind == "master":
        return piece.master
    state = trainable.optimizer.ensure_state(piece.master, use_muon=kind == "momentum")
    return state[_OPTIMIZER_KINDS[kind]]


def read_position(state_dir: Path) -> Position:
    """Of a hand-over."""
    return Position.model_validate_json((state_dir / STATE_FILE).read_bytes())


@torch.no_grad()
def load_checkpoint(trainable: Trainable, checkpoint_dir: Path) -> Position:
    """Replace the present state by that of a checkpoint, a critic's too, and return its position; all ranks call it.
    Raises DamagedCheckpointError on all of them; the state is then undefined."""

    def opened() -> tuple[dict[str, SavedFile], bytes, str]:
        if missing := find_missing(checkpoint_dir):
            return {}, b"", missing
        saved = SavedState(checkpoint_dir, read_index(checkpoint_dir))
        return dict(saved.files), bytes(saved.position_bytes()), saved.damage

    files, text, damage = on_first_rank(opened)
    if damage:
        raise DamagedCheckpointError(checkpoint_dir, damage)
    saved, position = SavedState(checkpoint_dir, files), Position.model_validate_json(text)
    if trainable.critic is not None:
        assert position.policy is not None, checkpoint_dir
        num_critic_updates = position.policy.num_critic_updates
        _load_tensors(
            trainable.critic, lambda kind: saved.of_kind(CRITIC + kind), str(checkpoint_dir), num_critic_updates
        )
    load_state(trainable, saved.of_kind, str(checkpoint_dir), position)
    for damage in gathered(saved.damage):
        if damage:
            raise DamagedCheckpointError(checkpoint_dir, damage)
    return position


@torch.no_grad()
def load_handover(trainable: Trainable, state_dir: Path, position: Position) -> None:
    """Continue from what the phase before left on the same course; all ranks call it."""
    load_state(trainable, lambda kind: StateFiles(state_dir, kind), str(state_dir), position)


def load_state(trainable: Trainable, open_kind: OpenKind, described: str, position: Position) -> None:
    """Load weights, router biases, momentum, moments and the random state, but no critic. Raises ValueError for another
    architecture or kind of optimizer."""
    _load_tensors(trainable, open_kind, described, position.optimizer_steps)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(position.torch_random_state), dtype=torch.uint8))


def _load_tensors(trainable: Trainable, open_kind: OpenKind, described: str, num_updates: int) -> None:
    load_master(trainable, open_kind("master"), described)
    names = {parameter: name for name, parameter in trainable.model.named_parameters()}
    pieces = pieces_of(trainable.engine, trainable.model, trainable.ranks)
    for kind, name_in_state in _OPTIMIZER_KINDS.items():
        source = open_kind(kind)
        held, wanted = source.names(), []
        for parameter, piece in pieces.items():
            ours = (kind == "momentum") == trainable.optimizer.has_momentum(parameter)
            is_there = _whole_names(names[parameter], piece, trainable.ranks)[0] in held
            if is_there and not ours:
                raise ValueError(
                    f"{described} holds the {kind} of {names[parameter]}, which another optimizer.kind updated: "
                    f"phases of one course share the kind"
                )
            if not ours:
                continue
            state = trainable.optimizer.ensure_state(piece.master, use_muon=kind == "momentum")
            target = piece.of(state[name_in_state])
            if is_there:
                wanted.append((names[parameter], piece, [(target, piece.start)]))
            else:  # no step was taken yet
                target.zero_()
            if kind == "first_moment":
                state["step"] = num_updates
        _fill(wanted, source, trainable)


@torch.no_grad()
def load_master(trainable: Trainable, source: TensorSource, described: str) -> None:
    """Load only the trained weights, and the router biases where all weights are trained: a start on another course
    begins with fresh moments."""
    model = trainable.model
    pieces = pieces_of(trainable.engine, model, trainable.ranks)
    _load(trainable, pieces, {} if is_frozen(model) else router_biases(model), source, described, {})


@torch.no_grad()
def load_frozen(divided: DividedModel, source: TensorSource, described: str) -> None:
    """Load what is not trained, router biases too: a frozen model, or what an adapter is added to. Raises ValueError
    where a matrix that is to be held in 4 bits is not finite."""
    model = divided.model
    matrices = four_bit_matrices(model)
    pieces = frozen_pieces_of(divided.engine, model)
    _load(divided, pieces, router_biases(model), source, described, matrices)
    for name, each in matrices.items():
        _quantize(name, each, source, divided.ranks.stage)


def _quantize(name: str, matrices: FourBitMatrices, source: TensorSource, everyone: Axis) -> None:
    """One matrix in memory at a time, on one rank; the others get it in 4 bits."""
    if everyone.rank == 0:
        for number, each in enumerate(checkpoint_names(name, matrices.shape[0])):
            matrix = source.read(each, matrices.shape[1:])
            if not matrix.isfinite().all():
                raise ValueError(
                    f"tensor {each} holds numbers that are not finite, which 4 bits have no code for: start from "
                    f"sound weights"
                )
            matrices.put(number, matrix)
    if everyone.group is not None:
        for buffer in matrices.buffers():
            dist.broadcast(buffer, everyone.ranks[0], group=everyone.group)


def _load(
    divided: DividedModel,
    pieces: dict[nn.Parameter, Piece],
    buffers: dict[str, Tensor],
    source: TensorSource,
    described: str,
    matrices: Mapping[str, FourBitMatrices],
) -> None:
    """`matrices` are read elsewhere, but from the same source."""
    names = {parameter: name for name, parameter in divided.model.named_parameters()}
    wanted = {
        each for parameter, piece in pieces.items() for each in _whole_names(names[parameter], piece, divided.ranks)
    }
    wanted |= {each for name, other in matrices.items() for each in checkpoint_names(name, other.shape[0])}
    wanted = _over_stages(wanted | set(buffers), divided.ranks)
    for name in sorted(wanted ^ source.names()):
        owner = "the model" if name in wanted else described
        raise ValueError(f"tensor {name} is only in {owner}: start from a phase of the same architecture")
    stage = divided.engine.zero_optimization_stage()
    targets = [
        (
            names[parameter],
            piece,
            [(piece.of(piece.master.detach()), piece.start), *_computed_with(parameter, piece, stage)],
        )
        for parameter, piece in pieces.items()
    ]
    _fill(targets, source, divided)
    everyone = divided.ranks.stage
    for name, buffer in buffers.items():
        if everyone.rank == 0:
            buffer.copy_(source.read(name, buffer.shape))
        if everyone.group is not None:
            dist.broadcast(buffer, everyone.ranks[0], group=everyone.group)


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
    wanted: list[tuple[str, Piece, list[tuple[Tensor, int]]]], source: TensorSource, divided: DividedModel
) -> None:
    """Copy into the targets of each parameter the elements that they hold of it, each flat with the number of its first
    element. A rank reads its own range, one tensor of the checkpoint at a time; where any holder wants more, they
    exchange what they read."""
    ranks, device = divided.ranks, divided.engine.device
    assert device is not None
    for (name, piece, targets), is_exchanged in zip(wanted, _exchanged(wanted, ranks, device), strict=True):
        own_first, own_stop = own_range(piece, ranks)
        for first, stop in windows(name, piece):
            begin, end = max(first, own_first), max(first, min(stop, own_stop))
            values = [_read(source, run) for run in runs_of(name, piece, begin, end, ranks)]
            if is_exchanged:
                part = torch.zeros(stop - first, device=device)
                if values:
                    torch.cat(values, out=part[begin - first : end - first])
                # As integers: a sum of floats would lose the sign of a zero.
                dist.all_reduce(part.view(torch.int32), group=holders(piece.parameter, ranks).group)
                begin, values = first, [part]
            for part in values:
                _copy_into(targets, part, begin)
                begin += part.numel()


def _exchanged(
    wanted: list[tuple[str, Piece, list[tuple[Tensor, int]]]], ranks: Ranks, device: torch.device
) -> list[bool]:
    """Whether any holder of each parameter wants elements that others read."""
    flags = []
    for _, piece, targets in wanted:
        first, stop = own_range(piece, ranks)
        flags.append(any(low < first or low + target.numel() > stop for target, low in targets if target.numel()))
    if ranks.stage.size == 1 or not flags:
        return [False] * len(flags)
    everyone = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX, group=ranks.stage.group)
    sizes = [holders(piece.parameter, ranks).size for _, piece, _ in wanted]
    return [bool(flag) and size > 1 for flag, size in zip(everyone.tolist(), sizes, strict=True)]


def _copy_into(targets: list[tuple[Tensor, int]], part: Tensor, offset: int) -> None:
    """Where they overlap; `offset` is the number of the part's first element."""
    for target, start in targets:
        low, high = max(offset, start), min(offset + part.numel(), start + target.numel())
        if low < high:
            target[low - start : high - start].copy_(part[low - offset : high - offset])


def _read(source: TensorSource, run: Run) -> Tensor:
    """Flat; of whole tensors one is in memory."""
    if isinstance(source, SavedTensors):
        return source.part(run)
    whole = source.read(run.tensor, torch.Size(run.shape))
    box = run.box
    matrix = whole.reshape(run.shape[0], -1)[box.first_row : box.stop_row, box.first_column : box.stop_column]
    return matrix.reshape(-1)[run.start : run.start + run.length]


def _whole_names(name: str, piece: Piece, ranks: Ranks) -> list[str]:
    return checkpoint_names(name, whole_shape(piece.parameter, piece.shape, ranks)[0])


def _over_stages(names: set[str], ranks: Ranks) -> set[str]:
    if ranks.pipeline.size == 1:
        return names
    lists: list[set[str]] = [set()] * ranks.pipeline.size
    dist.all_gather_object(lists, names, group=ranks.pipeline.group)
    return set().union(*lists)


def random_state_hex() -> str:
    return torch.get_rng_state().numpy().tobytes().hex()
