"""Writes and reads the `torch_dist` layout of Megatron-Core's GPTModel, tensor by tensor, without Megatron-Core.

Keys and global shapes are those of its sharded_state_dict for a model whose layers are listed one by one
(moe_layer_freq is a list): query, key and value of one group of heads follow one another in linear_qkv, gate and up
are the halves of linear_fc1, the experts of a layer are one tensor with the expert as its first axis, of which each
expert is a part of its own on disk. The MTP layer is mtp.layers.0. Torch's distributed checkpointing writes the files;
its index is a pickle, of which only torch's own classes are accepted when it is read.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from configs.schema import ModelRecipe
from model.formats.checkpoint_names import wrong_shape
from model.formats.hf_checkpoint import ROUTER_BIAS

_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
"""The beginning of what an optimizer holds; a model with experts has one for them and one for the rest."""
_VOCABULARY_KEYS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors with a row per token, which Megatron fills up to a multiple of --make-vocab-size-divisible-by."""
ITERATION, LATEST_FILE = "iter_0000000", "latest_checkpointed_iteration.txt"
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_METADATA_FILE, _COMMON_FILE, _CONFIG_FILE = ".metadata", "common.pt", "metadata.json"
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    # Megatron-Core 0.16 keeps its plan in the index.
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "torch": ("Size", "bfloat16", "float16", "float32", "float64", "int64", "uint8"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
}


@dataclass(frozen=True)
class MegatronTensor:
    """How a tensor of Megatron's is made of those of the checkpoint."""

    parts: tuple[tuple[str, ...], ...]
    """Checkpoint names: for each expert, or once, those that are joined."""
    join: Literal["one", "rows", "groups"]
    """One tensor; one after the other; or the rows of each group of heads one after the other."""
    has_experts: bool = False


def megatron_tensors(recipe: ModelRecipe) -> dict[str, MegatronTensor]:
    """All tensors by Megatron's keys."""
    tensors = {
        "embedding.word_embeddings.weight": _one("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": _one("model.norm.weight"),
        "output_layer.weight": _one("lm_head.weight"),
    }
    for layer in range(recipe.num_hidden_layers):
        tensors |= _layer(recipe, f"decoder.layers.{layer}", layer)
    if recipe.num_nextn_predict_layers:
        theirs, ours = "mtp.layers.0", f"model.layers.{recipe.num_hidden_layers}"
        tensors |= {f"{theirs}.{name}.weight": _one(f"{ours}.{name}.weight") for name in ("enorm", "hnorm", "eh_proj")}
        tensors[f"{theirs}.final_layernorm.weight"] = _one(f"{ours}.shared_head.norm.weight")
        tensors |= _layer(recipe, f"{theirs}.transformer_layer", recipe.num_hidden_layers)
    return tensors


def _one(name: str) -> MegatronTensor:
    return MegatronTensor(((name,),), "one")


def _layer(recipe: ModelRecipe, theirs: str, layer: int) -> dict[str, MegatronTensor]:
    ours = f"model.layers.{layer}"
    attention, is_dense = f"{theirs}.self_attention", layer < recipe.first_k_dense_replace
    norm = "mlp.linear_fc1.layer_norm_weight" if is_dense else "pre_mlp_layernorm.weight"
    tensors = {
        f"{attention}.linear_qkv.layer_norm_weight": _one(f"{ours}.input_layernorm.weight"),
        f"{theirs}.{norm}": _one(f"{ours}.post_attention_layernorm.weight"),
        f"{attention}.linear_proj.weight": _one(f"{ours}.self_attn.o_proj.weight"),
    }
    for kind in ("weight", "bias") if recipe.attention_bias else ("weight",):
        names = tuple(f"{ours}.self_attn.{each}_proj.{kind}" for each in "qkv")
        tensors[f"{attention}.linear_qkv.{kind}"] = MegatronTensor((names,), "groups")
    if recipe.use_qk_norm:
        tensors |= {
            f"{attention}.{each}_layernorm.weight": _one(f"{ours}.self_attn.{each}_norm.weight") for each in "qk"
        }
    if is_dense:
        return tensors | _gated(f"{theirs}.mlp", (f"{ours}.mlp",))
    tensors[f"{theirs}.mlp.router.weight"] = _one(f"{ours}.mlp.gate.weight")
    tensors[f"{theirs}.mlp.router.expert_bias"] = _one(f"{ours}.mlp.gate.{ROUTER_BIAS}")
    experts = tuple(f"{ours}.mlp.experts.{expert}" for expert in range(recipe.n_routed_experts))
    tensors |= _gated(f"{theirs}.mlp.experts.experts", experts, has_experts=True)
    if recipe.n_shared_experts:
        tensors |= _gated(f"{theirs}.mlp.shared_experts", (f"{ours}.mlp.shared_experts",))
    return tensors


def _gated(theirs: str, ours: tuple[str, ...], has_experts: bool = False) -> dict[str, MegatronTensor]:
    first = tuple((f"{each}.gate_proj.weight", f"{each}.up_proj.weight") for each in ours)
    second = tuple((f"{each}.down_proj.weight",) for each in ours)
    return {
        f"{theirs}.linear_fc1.weight": MegatronTensor(first, "rows", has_experts),
        f"{theirs}.linear_fc2.weight": MegatronTensor(second, "one", has_experts),
    }


def write_megatron(
    directory: Path,
    recipe: ModelRecipe,
    shapes: Mapping[str, torch.Size],
    dtype_of: Callable[[str], torch.dtype],
    read: Callable[[str], Tensor],
) -> None:
    """Write the weights below `directory` as the checkpoint of iteration 0. `read` gives a tensor by its checkpoint
    name; of stacked experts one is in memory."""
    below = directory / ITERATION
    below.mkdir(parents=True)
    planner = _Planner(recipe, shapes, dtype_of, read)
    writer = FileSystemWriter(below, thread_count=1, overwrite=False)
    try:
        with warnings.catch_warnings(action="ignore"):  # it says that one process writes, which is meant
            save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
    torch.save({"iteration": 0, "checkpoint_version": 3.0}, below / _COMMON_FILE)
    (below / _CONFIG_FILE).write_text(json.dumps(_CONFIG))
    (directory / LATEST_FILE).write_text("0")


class _Planner(DefaultSavePlanner):
    """Plans the parts from shapes, and reads each when it is written."""

    def __init__(
        self,
        recipe: ModelRecipe,
        shapes: Mapping[str, torch.Size],
        dtype_of: Callable[[str], torch.dtype],
        read: Callable[[str], Tensor],
    ) -> None:
        super().__init__()
        self.tensors, self.groups = megatron_tensors(recipe), recipe.num_key_value_heads
        self.shapes, self.dtype_of, self.read_tensor = shapes, dtype_of, read

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, tensor in self.tensors.items():
            size = joined_shape(tensor, self.shapes)
            properties = TensorProperties(dtype=self.dtype_of(tensor.parts[0][0]))
            sizes = torch.Size((1, *size[1:])) if tensor.has_experts else size
            for number in range(len(tensor.parts)):
                chunk = ChunkStorageMetadata(torch.Size((number, *(0,) * (len(size) - 1))), sizes)
                data = TensorWriteData(chunk=chunk, properties=properties, size=size)
                items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        tensor, offsets = self.tensors[write_item.index.fqn], write_item.index.offset
        assert offsets is not None, write_item
        number = offsets[0] if tensor.has_experts else 0
        joined = _joined([self.read_tensor(name) for name in tensor.parts[number]], tensor.join, self.groups)
        return joined.unsqueeze(0) if tensor.has_experts else joined


def joined_shape(tensor: MegatronTensor, shapes: Mapping[str, torch.Size]) -> torch.Size:
    """The global shape of a tensor of Megatron's."""
    rows = sum(shapes[name][0] for name in tensor.parts[0])
    shape = (rows, *shapes[tensor.parts[0][0]][1:])
    return torch.Size((len(tensor.parts), *shape) if tensor.has_experts else shape)


def _joined(tensors: list[Tensor], join: str, groups: int) -> Tensor:
    if join == "one":
        return tensors[0]
    if join == "rows":
        return torch.cat(tensors)
    split = [tensor.unflatten(0, (groups, -1)) for tensor in tensors]
    return torch.cat(split, dim=1).flatten(0, 1)


def _separated(joined: Tensor, rows: list[int], join: str, groups: int) -> list[Tensor]:
    if join == "one":
        return [joined]
    if join == "rows":
        return list(joined.split(rows))
    split = joined.unflatten(0, (groups, -1)).split([each // groups for each in rows], dim=1)
    return [each.flatten(0, 1) for each in split]


def iteration_dir(path: Path) -> Path | None:
    """The directory of a `torch_dist` checkpoint's files, or None where `path` holds none."""
    latest = path / LATEST_FILE
    if latest.is_file():
        named = latest.read_text().strip()
        found = path / (f"iter_{int(named):07d}" if named.isdecimal() else named)
    else:
        found = path
    return found if (found / _METADATA_FILE).is_file() else None


class MegatronFiles:
    """The tensors of a `torch_dist` directory under checkpoint names; however its ranks divided them."""

    def __init__(self, path: Path, recipe: ModelRecipe, shapes: Mapping[str, torch.Size]) -> None:
        """Raises ValueError where a tensor is missing, unexpected or of another shape. Rows that fill up a vocabulary
        are left out."""
        found = iteration_dir(path)
        assert found is not None, path
        self.directory, self.groups, self.shapes = found, recipe.num_key_value_heads, shapes
        self.tensors = megatron_tensors(recipe)
        self.index = _read_index(found / _METADATA_FILE)
        stored = {
            key: each
            for key, each in self.index.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata) and _is_weight(key)
        }
        for key in sorted(set(stored) ^ set(self.tensors)):
            problem = "missing" if key in self.tensors else "unexpected"
            raise ValueError(f"{found}: tensor {key} is {problem}: it is the checkpoint of another architecture")
        for key, tensor in self.tensors.items():
            held, wanted = tuple(stored[key].size), tuple(joined_shape(tensor, shapes))
            if held != wanted and not (key in _VOCABULARY_KEYS and _is_filled_up(held, wanted)):
                raise ValueError(f"{found}: {wrong_shape(key, held, wanted)}")
        self.places = {
            name: (key, number)
            for key, tensor in self.tensors.items()
            for number, names in enumerate(tensor.parts)
            for name in names
        }
        self._last: tuple[tuple[str, int], list[Tensor]] | None = None

    def names(self) -> set[str]:
        return set(self.places)

    def read(self, name: str, shape: torch.Size) -> Tensor:
        key, number = place = self.places[name]
        tensor = self.tensors[key]
        if self._last is None or self._last[0] != place:
            rows = [self.shapes[each][0] for each in tensor.parts[number]]
            joined = self._read_part(key, number if tensor.has_experts else None)
            self._last = place, _separated(joined[: sum(rows)], rows, tensor.join, self.groups)
        found = self._last[1][tensor.parts[number].index(name)].clone()
        assert found.shape == shape, (name, found.shape, shape)
        return found

    def _read_part(self, key: str, expert: int | None) -> Tensor:
        """A whole tensor, or one expert of it, put together from the parts on disk."""
        stored = self.index.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata), key
        shape = stored.size if expert is None else stored.size[1:]
        whole = torch.empty(shape, dtype=stored.properties.dtype)
        num_filled = 0
        for chunk in stored.chunks:
            offsets, sizes = list(chunk.offsets), list(chunk.sizes)
            if expert is not None and not offsets[0] <= expert < offsets[0] + sizes[0]:
                continue
            part = self._read_chunk(key, chunk.offsets)
            if expert is not None:
                part, offsets, sizes = part[expert - offsets[0]], offsets[1:], sizes[1:]
            place = tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))
            whole[place] = part
            num_filled += part.numel()
        if num_filled != whole.numel():
            raise ValueError(f"{self.directory}: parts of tensor {key} are missing: copy the checkpoint again")
        return whole

    def _read_chunk(self, key: str, offsets: torch.Size) -> Tensor:
        where = self.index.storage_data[MetadataIndex(key, offsets)]
        with open(self.directory / where.relative_path, "rb") as file:
            file.seek(where.offset)
            return torch.load(io.BytesIO(file.read(where.length)), weights_only=True, map_location="cpu")


def _is_filled_up(held: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether rows were added up to the next multiple of a power of two: more are the vocabulary of another model."""
    largest_power = held[0] & -held[0]
    return held[1:] == wanted[1:] and 0 < held[0] - wanted[0] < largest_power


def _is_weight(key: str) -> bool:
    """Whether a tensor is the model's; Megatron keeps the optimizer's beside them, and extra states."""
    return _OPTIMIZER.match(key) is None and "_extra_state" not in key


class _IndexReader(pickle.Unpickler):
    """Takes only the classes of an index, by name, so that a foreign file cannot run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name not in _INDEX_CLASSES.get(module_name, ()):
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of an index")
        return super().find_class(module_name, global_name)


def _read_index(path: Path) -> Metadata:
    try:
        with open(path, "rb") as file:
            index = _IndexReader(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ImportError) as error:
        raise ValueError(f"{path} is no index of torch's checkpoints ({error}): copy the checkpoint again") from error
    if not isinstance(index, Metadata):
        raise ValueError(f"{path} is no index of torch's checkpoints: copy the checkpoint again")
    return index
