"""Runs of a tensor: what one division wrote is read by any other, against plain slicing of the whole."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from configs.files import stored_files
from tasks.training.state import checkpoints
from tasks.training.state.checkpoints import read_index, write_file, write_index
from tasks.training.state.saved_state import SavedState
from tasks.training.state.tensor_runs import Run, matrix_of
from tests.support.saved_states import flip_a_bit

TENSORS = {name: torch.randn(shape) for name, shape in {"a": (6, 8), "b": (24,), "c": (12, 2)}.items()}
DIVISIONS = list(itertools.product(("rows", "columns"), (1, 2), (1, 3, 5)))
"""Along what, among how many, and in how many runs the flattened part of each is cut."""


def runs_of(name: str, along: str, num_parts: int, num_runs: int) -> list[Run]:
    shape = tuple(TENSORS[name].shape)
    box = matrix_of(shape)
    size, runs = (box.num_rows if along == "rows" or box.width == 1 else box.width) // num_parts, []
    for part in range(num_parts):
        own = (
            box._replace(first_row=part * size, stop_row=(part + 1) * size)
            if along == "rows" or box.width == 1
            else box._replace(first_column=part * size, stop_column=(part + 1) * size)
        )
        bounds = [own.num_rows * own.width * number // num_runs for number in range(num_runs + 1)]
        runs += [Run(name, shape, own, low, high - low) for low, high in itertools.pairwise(bounds) if low < high]
    return runs


def sliced(run: Run) -> torch.Tensor:
    """The elements of a run, by plain slicing."""
    matrix = TENSORS[run.tensor].view(run.shape[0], -1)
    part = matrix[run.box.first_row : run.box.stop_row, run.box.first_column : run.box.stop_column]
    return part.reshape(-1)[run.start : run.start + run.length]


def write(directory: Path, division: tuple[str, int, int]) -> SavedState:
    """Two files, each with every other run."""
    directory.mkdir()
    runs = [run for name in TENSORS for run in runs_of(name, *division)]
    files = {}
    for number in range(2):
        own = runs[number::2]
        data = torch.cat([sliced(run) for run in own]).numpy().data
        files[f"rank-{number}.bin"] = write_file(
            directory / f"rank-{number}.bin", data, tuple(("kind", run) for run in own)
        )
    write_index(directory, files)
    return SavedState(directory, read_index(directory))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (stored_files, checkpoints):
        monkeypatch.setattr(module, "BLOCK_BYTES", 20)


@pytest.mark.parametrize("written", DIVISIONS, ids=str)
def test_every_division_reads_what_every_other_wrote(written, tmp_path):
    state = write(tmp_path / "saved", written)
    tensors = state.of_kind("kind")
    for name, whole in TENSORS.items():
        assert tensors.tensor(name).equal(whole)
        for division in DIVISIONS:
            for run in runs_of(name, *division):
                assert tensors.part(run).equal(sliced(run)), (run, written)
    assert state.damage == ""


def test_what_was_not_saved_and_another_shape_are_refused(tmp_path):
    state = write(tmp_path / "saved", ("rows", 1, 3))
    with pytest.raises(ValueError, match=r"a is \(6, 8\) in .*, \(8, 6\) in the model: use one architecture"):
        state.of_kind("kind").read("a", torch.Size((8, 6)))
    files = read_index(state.directory)
    files.pop("rank-1.bin")
    with pytest.raises(ValueError, match="elements of a were not saved"):
        SavedState(state.directory, files).of_kind("kind").tensor("a")


def test_damage_is_remembered_while_reading_goes_on(tmp_path):
    state = write(tmp_path / "saved", ("rows", 1, 1))
    flip_a_bit(state.directory / "rank-0.bin")
    for name in TENSORS:
        state.of_kind("kind").tensor(name)
    assert re.fullmatch(r"rank-0.bin: the block at byte \d+ has another digest", state.damage)
