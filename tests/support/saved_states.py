"""Checkpoints as one whole: written by all ranks of a test, and read as whole tensors."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from tasks.training.parallel.control import gathered, on_first_rank
from tasks.training.parallel.trainable import Trainable
from tasks.training.state.checkpoints import read_index, write_index
from tasks.training.state.node_checkpoints import write_snapshot
from tasks.training.state.position import Position
from tasks.training.state.saved_state import SavedState
from tasks.training.state.state import take_snapshot


def save_state(trainable: Trainable, position: Position, directory: Path) -> None:
    """A checkpoint in a directory; all ranks call it."""
    on_first_rank(lambda: directory.mkdir(exist_ok=True))
    own = write_snapshot(directory, dist.get_rank(), take_snapshot(trainable, position))
    files = {name: file for part in gathered(own) for name, file in part.items()}
    on_first_rank(lambda: write_index(directory, files))


def whole_tensors(directory: Path) -> dict[str, Tensor]:
    """By kind and name, separated by a space."""
    saved = SavedState(directory, read_index(directory))
    tensors = {
        f"{kind} {name}": saved.of_kind(kind).tensor(name)
        for kind in saved.kinds()
        for name in sorted(saved.of_kind(kind).names())
    }
    assert not saved.damage, saved.damage
    return tensors


def flip_a_bit(path: Path) -> None:
    """In the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def state_tensors(trainable: Trainable, position: Position) -> dict[str, Tensor]:
    """As `whole_tensors`, of the present state; all ranks call it, and all have the result."""
    directory = Path(on_first_rank(tempfile.mkdtemp))
    save_state(trainable, position, directory)
    return whole_tensors(directory)
