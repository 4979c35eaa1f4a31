"""Reads the state of a committed checkpoint, which each rank wrote a part of: any elements, from any topology.

Every block is compared with its digest when it is first read. Damage does not stop a reader, since other ranks may wait
for it: it reads zeros and says so at the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from configs.files.stored_files import CorruptFileError, VerifiedReader
from tasks.training.state.checkpoints import SavedFile
from tasks.training.state.tensor_runs import Box, Run, overlaps, whole_run

STATE_FILE = "state.json"
ELEMENT_BYTES = 4
NUM_OPEN_FILES = 4


class SavedState:
    """The tensors and the position of a checkpoint."""

    def __init__(self, checkpoint_dir: Path, files: Mapping[str, SavedFile]) -> None:
        self.directory, self.files = checkpoint_dir, files
        self.damage = ""
        """What first did not read as it was written; what was read is then worth nothing."""
        self._readers: OrderedDict[str, VerifiedReader] = OrderedDict()
        self._runs: dict[str, dict[str, list[tuple[str, int, Run]]]] = {}
        for name, file in files.items():
            offset = 0
            for kind, run in file.runs:
                self._runs.setdefault(kind, {}).setdefault(run.tensor, []).append((name, offset, run))
                offset += run.length

    def kinds(self) -> list[str]:
        """Kinds of tensors, as in the names of a hand-over's files."""
        return sorted(self._runs)

    def of_kind(self, kind: str) -> SavedTensors:
        return SavedTensors(self, self._runs.get(kind, {}))

    def position_bytes(self) -> bytearray:
        """state.json."""
        return self._read(STATE_FILE, 0, self.files[STATE_FILE].size)

    def elements(self, file: str, first: int, num_elements: int) -> Tensor:
        """Elements of a file, flat, float32."""
        data = self._read(file, first * ELEMENT_BYTES, num_elements * ELEMENT_BYTES)
        return torch.frombuffer(data, dtype=torch.float32)

    def _read(self, file: str, offset: int, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        try:
            reader = self._reader(file)
            reader.seek(offset)
            reader.readinto(data)
        except CorruptFileError as error:
            self.damage = self.damage or f"{file}: {error.problem}"
        except OSError as error:
            self.damage = self.damage or str(error)
        return data

    def _reader(self, file: str) -> VerifiedReader:
        if file not in self._readers:
            self._readers[file] = VerifiedReader(self.files[file].stored(self.directory / file))
            if len(self._readers) > NUM_OPEN_FILES:
                self._readers.popitem(last=False)[1].close()
        self._readers.move_to_end(file)
        return self._readers[file]


class SavedTensors:
    """One kind of tensor of a checkpoint."""

    def __init__(self, state: SavedState, runs: Mapping[str, list[tuple[str, int, Run]]]) -> None:
        self._state, self._runs = state, runs

    def names(self) -> set[str]:
        return set(self._runs)

    def shapes(self) -> dict[str, torch.Size]:
        """By name, sorted."""
        return {name: torch.Size(runs[0][2].shape) for name, runs in sorted(self._runs.items())}

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        return self.read(name, torch.Size(self._runs[name][0][2].shape))

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """As `tensor`. Raises ValueError where the shape is another one."""
        return self.part(whole_run(name, shape)).view(shape)

    def part(self, run: Run) -> Tensor:
        """The elements of a run, flat. Raises ValueError where the tensor has another shape."""
        out = torch.empty(run.length)
        num_missing = run.length
        for file, offset, saved in self._runs[run.tensor]:
            if saved.shape != run.shape:
                raise ValueError(
                    f"{run.tensor} is {saved.shape} in {self._state.directory}, {run.shape} in the model: use one "
                    f"architecture"
                )
            for rectangle in overlaps(run, saved):
                first = saved.offset_of(rectangle)
                num_read = (rectangle.num_rows - 1) * saved.box.width + rectangle.width
                source = self._state.elements(file, offset + first, num_read)
                view_of(out[run.offset_of(rectangle) :], run, rectangle).copy_(view_of(source, saved, rectangle))
                num_missing -= rectangle.num_rows * rectangle.width
        if num_missing:
            raise ValueError(f"{self._state.directory}: {num_missing} elements of {run.tensor} were not saved")
        return out


def view_of(flat: Tensor, run: Run, rectangle: Box) -> Tensor:
    """A rectangle in a flat tensor that begins with the rectangle's first element and is laid out as the run is."""
    return flat.as_strided((rectangle.num_rows, rectangle.width), (run.box.width, 1), flat.storage_offset())
