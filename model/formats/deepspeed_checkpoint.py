"""Reads a checkpoint of a plain DeepSpeed engine, ZeRO stages 1 to 3, tensor by tensor, without DeepSpeed.

`latest` names the directory of a step. Its `*_optim_states.pt`, one of each rank, hold the float32 masters as flat
vectors, `*_model_states.pt` names, shapes, buffers and frozen parameters. Both are pickles: only tensors and plain
values are accepted, and four classes of DeepSpeed's, which become plain ones here. Files are mapped, so only what is
read of a vector comes into memory. Names are those of the trained module: transformers' stacks of experts are taken
apart. The layout is that of deepspeed/utils/zero_to_fp32.py.
"""

from __future__ import annotations

import bisect
import math
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import ModelRecipe
from model.formats.checkpoint_names import stacked_name, wrong_shape

LATEST_FILE = "latest"
_RANK_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(?:optim|model)_states\.pt")
_ONE_MODEL_FILE = "mp_rank_00_model_states.pt"
_ALIGNED_TO = 2
"""Elements per rank to which stages 1 and 2 fill up a vector."""


class _Ignored:
    """In place of an object that no weight depends on."""


_CLASSES = [
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Ignored, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


class _Vector:
    """Flat tensors, one after the other."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = [part.flatten() for part in parts]
        self.starts = [0, *accumulate(part.numel() for part in self.parts)]

    @property
    def size(self) -> int:
        return self.starts[-1]

    def take(self, start: int, stop: int) -> Iterator[Tensor]:
        number = bisect.bisect_right(self.starts, start) - 1
        while start < stop:
            until = min(stop, self.starts[number + 1])
            yield self.parts[number][start - self.starts[number] : until - self.starts[number]]
            start, number = until, number + 1


@dataclass(frozen=True)
class _Stored:
    """A parameter or buffer of the module: its shape, and where its elements are, in order."""

    shape: torch.Size
    spans: tuple[tuple[_Vector, int, int], ...]
    """Vector, first element, number of elements."""

    def read(self, start: int, stop: int) -> Tensor:
        """Elements of the flat tensor, in float32."""
        pieces, first = [], 0
        for vector, offset, count in self.spans:
            low, high = max(start, first), min(stop, first + count)
            if low < high:
                pieces += vector.take(offset + low - first, offset + high - first)
            first += count
        return torch.cat([piece.float() for piece in pieces])


@dataclass(frozen=True)
class _Place:
    """The part of a stored tensor that is one tensor of a checkpoint: the rows of an expert, or all."""

    stored: str
    start: int


def step_dir(path: Path) -> Path | None:
    """The directory that `latest` names, or None without one. Raises ValueError where it is not there."""
    latest = path / LATEST_FILE
    if not latest.is_file():
        return None
    named = latest.read_text(encoding="utf-8").strip()
    found = path / named
    if Path(named).name != named or not any(found.glob("*_model_states.pt")):
        raise ValueError(f"{latest} names {named!r}, which holds no *_model_states.pt: copy that directory beside it")
    return found


class DeepSpeedFiles:
    """The tensors of a step's directory under checkpoint names."""

    def __init__(self, directory: Path, recipe: ModelRecipe, shapes: Mapping[str, torch.Size]) -> None:
        """Raises ValueError where a file or a tensor is missing, unexpected or of another shape."""
        self.directory, self.shapes = directory, shapes
        self.stored = _stored_tensors(directory)
        self.places = self._places(recipe)

    def names(self) -> set[str]:
        return set(self.places)

    def read(self, name: str, shape: torch.Size) -> Tensor:
        place = self.places[name]
        return self.stored[place.stored].read(place.start, place.start + shape.numel()).view(shape)

    def _places(self, recipe: ModelRecipe) -> dict[str, _Place]:
        places, used = {}, set()
        for name, shape in self.shapes.items():
            theirs, start, whole = self._find(name, shape, recipe)
            if theirs is None:
                mtp = f"model.layers.{recipe.num_hidden_layers}."
                hint = ": transformers trains no MTP layer, so write num_nextn_predict_layers 0 into config.json"
                raise ValueError(f"{self.directory}: tensor {name} is missing{hint if name.startswith(mtp) else ''}")
            held = self.stored[theirs].shape
            if tuple(held) != tuple(whole):
                raise ValueError(f"{self.directory}: {wrong_shape(theirs, tuple(held), tuple(whole))}")
            used.add(theirs)
            places[name] = _Place(theirs, start)
        for theirs in sorted(set(self.stored) - used):
            raise ValueError(f"{self.directory}: tensor {theirs} is unexpected: config.json belongs to another model")
        return places

    def _find(
        self, name: str, shape: torch.Size, recipe: ModelRecipe
    ) -> tuple[str | None, int, tuple[int, ...] | torch.Size]:
        """The stored tensor that holds one of the checkpoint's, the element at which it begins, and the shape of all of
        it; None where there is none."""
        if name in self.stored:
            return name, 0, shape
        stack, expert = stacked_name(name)
        if expert is None:
            return None, 0, shape
        experts, _, matrix = stack.rpartition(".")
        is_down = matrix == "down_proj"
        theirs = f"{experts}.{'down_proj' if is_down else 'gate_up_proj'}"
        if theirs not in self.stored:
            return None, 0, shape
        rows = shape[0] if is_down else 2 * shape[0]
        start = (expert * rows + (shape[0] if matrix == "up_proj" else 0)) * shape[1]
        return theirs, start, (recipe.n_routed_experts, rows, shape[1])


def _stored_tensors(directory: Path) -> dict[str, _Stored]:
    """Every parameter and buffer of the module by its name there."""
    optim_files, model_files = _rank_files(directory, "optim"), _rank_files(directory, "model")
    optims = [_load(path, "optimizer_state_dict") for path in optim_files]
    stage, counts = int(optims[0].get("zero_stage", 0)), optims[0].get("partition_count", 0)
    num_ranks = max(counts) if isinstance(counts, list) else counts
    if stage not in (1, 2, 3):
        raise ValueError(f"{optim_files[0]} is of ZeRO stage {stage}: stages 1 to 3 are read")
    wanted_models = num_ranks if stage == 3 else 1
    for kind, files, wanted in (("optim", optim_files, num_ranks), ("model", model_files, wanted_models)):
        if len(files) != wanted:
            raise ValueError(
                f"{directory} holds {len(files)} *_{kind}_states.pt, {wanted} are needed: copy those of every rank"
            )
    models = [_load(path) for path in model_files]
    groups = [optim["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] for optim in optims]
    trained = (
        _of_stage_3(directory, models[0]["param_shapes"], groups)
        if stage == 3
        else _of_stage_2(directory, models[0]["param_shapes"], groups, optims[0].get("param_alignment_paddings"))
    )
    module = {name: tensor for name, tensor in models[0]["module"].items() if name not in trained}
    if stage == 3:  # in its module only buffers are whole
        module = {name: module[name] for name in models[0]["buffer_names"] if name in module}
    held = trained | {name: _whole([tensor], tensor.shape) for name, tensor in module.items()}
    if stage == 3:
        for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
            held[name] = _whole([model["frozen_param_fragments"][name] for model in models], torch.Size(shape))
    held |= {name: held[of] for name, of in (models[0].get("shared_params") or {}).items() if of in held}
    return {name.removeprefix("module."): tensor for name, tensor in held.items()}


def _rank_files(directory: Path, kind: str) -> list[Path]:
    """The files of one kind by rank. Raises ValueError where another axis than the data divides the model."""
    by_rank = {}
    for path in directory.glob(f"*_{kind}_states.pt"):
        match = _RANK_FILE.fullmatch(path.name)
        if match is None and path.name != _ONE_MODEL_FILE:
            raise ValueError(
                f"{path} is a part of a model that tensor, expert or pipeline parallelism divides: its framework's own "
                f"export to Hugging Face reads it"
            )
        by_rank[0 if match is None else int(match[1])] = path
    if not by_rank:
        raise ValueError(f"{directory} holds no zero_pp_rank_*_{kind}_states.pt: stages 1 to 3 of ZeRO are read")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _load(path: Path, part: str = "") -> dict[str, Any]:
    """A file, or a dictionary in it; no code of it runs."""
    try:
        with torch.serialization.safe_globals(list(_CLASSES)):
            held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        found = held[part] if part else held
        assert isinstance(found, dict), type(found)
        return found
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, AssertionError, TypeError) as error:
        said = re.search(r"GLOBAL (\S+)", str(error))
        problem = (
            f"it holds {said[1]}, which is not read: it could run code" if said else "it is damaged or another file"
        )
        raise ValueError(f"{path} is no checkpoint of DeepSpeed that can be read: {problem}") from error


def _of_stage_2(
    directory: Path, shapes: list[Mapping[str, Any]], groups: list[list[Tensor]], paddings: list[list[int]] | None
) -> dict[str, _Stored]:
    """Each group of parameters is one vector, cut into a piece for every rank."""
    stored = {}
    for number, named in enumerate(shapes):
        vector, offset = _Vector([own[number] for own in groups]), 0
        for place, (name, shape) in enumerate(named.items()):
            size = math.prod(shape)
            stored[name] = _Stored(torch.Size(shape), ((vector, offset, size),))
            offset += size + (paddings[number][place] if paddings else 0)
        aligned = _ALIGNED_TO * len(groups)
        if -(-offset // aligned) != -(-vector.size // aligned):
            raise ValueError(_other_sizes(directory, f"group {number}", offset, vector.size))
    return stored


def _of_stage_3(directory: Path, shapes: list[Mapping[str, Any]], groups: list[list[Tensor]]) -> dict[str, _Stored]:
    """Each parameter is cut into equal pieces, one of every rank; a rank's vector has its pieces in order."""
    stored, offset, vectors = {}, 0, [_Vector(own) for own in groups]
    for name, shape in (item for named in shapes for item in named.items()):
        size = math.prod(shape)
        part = -(-size // len(vectors))
        counts = [max(0, min(part, size - rank * part)) for rank in range(len(vectors))]
        spans = tuple((vector, offset, count) for vector, count in zip(vectors, counts, strict=True))
        stored[name] = _Stored(torch.Size(shape), spans)
        offset += part
    for rank, vector in enumerate(vectors):
        if vector.size != offset:
            raise ValueError(_other_sizes(directory, f"rank {rank}", offset, vector.size))
    return stored


def _other_sizes(directory: Path, what: str, wanted: int, found: int) -> str:
    return f"{directory}: the weights of {what} have {found:,} numbers, their shapes {wanted:,}: copy the files again"


def _whole(parts: list[Tensor], shape: torch.Size) -> _Stored:
    return _Stored(shape, ((_Vector(parts), 0, shape.numel()),))
