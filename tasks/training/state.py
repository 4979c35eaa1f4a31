"""The hand-over state: everything from which training continues, under checkpoint names, independent of ranks and engine.

Files: master-NNNNN.safetensors (float32 weights and router biases), momentum-NNNNN (Muon), first_moment-NNNNN and second_moment-NNNNN
(AdamW), state.json (position, counters, random state). It is the format of a phase's hand-over and of its own checkpoints alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from configs.schema import Frozen
from model.checkpoint_names import from_checkpoint_tensors, to_checkpoint_tensors

if TYPE_CHECKING:
    from torch.optim import Optimizer

STATE_FILE = "state.json"
MAX_SHARD_BYTES = 1 << 30
_OPTIMIZER_KINDS = {"momentum": "momentum_buffer", "first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
"""File name -> name in the optimizer's per-parameter state."""


class StepLosses(Frozen):
    """Losses of one optimizer step, averaged over its targets; unweighted."""

    lm: float
    mtp: float
    balance: float


class PolicyProgress(Frozen):
    """What a policy objective carries from step to step."""

    mean_rewards: tuple[float, ...]
    """Of each step of the phase."""
    num_constant_steps: int
    """Steps up to here, in a row, in which no group had two different rewards."""


class Position(Frozen):
    """state.json: where a phase stands after an optimizer step."""

    course: str
    phase: str
    step: int
    """Optimizer steps of this phase."""
    num_tokens: int
    """Tokens of this phase; the next row of the packed order is num_tokens / sequence_length."""
    course_tokens: int
    """Tokens of the course, this phase's included."""
    optimizer_steps: int
    """Steps that the moments have seen, over all phases that continued them: AdamW's bias correction counts them."""
    torch_random_state: str
    """Hex."""
    losses: StepLosses | None
    """Of the last step; none before the first."""
    policy: PolicyProgress | None
    """None where answers are not sampled."""


def dump_state(model: nn.Module, optimizer: Optimizer, position: Position) -> Iterator[tuple[str, bytes]]:
    """File names and bytes of the hand-over state, one shard in memory at a time. Equal state, equal bytes."""
    kinds = {"master": to_checkpoint_tensors(model.state_dict())}
    for kind, key in _OPTIMIZER_KINDS.items():
        entries = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
        kinds[kind] = to_checkpoint_tensors({name: entry[key] for name, entry in entries.items() if key in entry})
    for kind, tensors in kinds.items():
        for number, shard in enumerate(_shards(tensors), start=1):
            yield f"{kind}-{number:05d}.safetensors", save(shard)
    yield STATE_FILE, (position.model_dump_json(indent=1) + "\n").encode()


def read_position(state_dir: Path) -> Position:
    return Position.model_validate_json((state_dir / STATE_FILE).read_bytes())


@torch.no_grad()
def load_state(model: nn.Module, optimizer: Optimizer, state_dir: Path, position: Position) -> None:
    """Put weights, router biases, momentum and moments in place, and the random state. Raises ValueError for another architecture or
    kind of optimizer."""
    load_master(model, state_dir)
    parameters = dict(model.named_parameters())
    for kind, key in _OPTIMIZER_KINDS.items():
        for name, tensor in _read_kind(state_dir, kind).items():
            if (kind == "momentum") != parameters[name].use_muon:  # pyright: ignore[reportAttributeAccessIssue]
                raise ValueError(
                    f"{state_dir} holds the {kind} of {name}, which another optimizer.kind updated: phases of one course share the kind"
                )
            entry = optimizer.state[parameters[name]]
            entry[key] = tensor.to(parameters[name].device)
            if kind == "first_moment":
                entry["step"] = position.optimizer_steps
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(position.torch_random_state), dtype=torch.uint8))


@torch.no_grad()
def load_master(model: nn.Module, state_dir: Path) -> None:
    """Put only the weights and router biases in place: a start on another course begins with fresh moments."""
    tensors = _read_kind(state_dir, "master")
    own = model.state_dict()
    for name in sorted(set(own) ^ set(tensors)):
        owner = "the model" if name in own else f"the state in {state_dir}"
        raise ValueError(f"tensor {name} is only in {owner}: start from a phase of the same architecture")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(
                f"{name} is {tuple(tensors[name].shape)} in {state_dir}, {tuple(tensor.shape)} in the model: use one architecture"
            )
        tensor.copy_(tensors[name])


def random_state_hex() -> str:
    return torch.get_rng_state().numpy().tobytes().hex()


def _read_kind(state_dir: Path, kind: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(state_dir.glob(f"{kind}-*.safetensors")):
        tensors.update(load_file(path))
    return from_checkpoint_tensors(tensors)


def _shards(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shard and filled + size > MAX_SHARD_BYTES:
            yield shard
            shard, filled = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        filled += size
    if shard:
        yield shard
