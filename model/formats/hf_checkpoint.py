"""Writes and reads the Hugging Face `glm4_moe` layout: config.json, safetensors, the MTP layer as layer N.

There is one tensor per expert. Every tensor is accounted for: a missing, unexpected or wrongly shaped one is a
ValueError that names tensor and file. Both MTP layouts are read: GLM-4.6's, and GLM-4.5's, which repeats embedding
and unembedding as `layers.N.embed_tokens` and `layers.N.shared_head.head` (vllm #27597). We write 4.6's. The repeated
tensors are checked against the trunk's and then left out: training has one copy of each, so a checkpoint whose copies
differ cannot be represented and is refused. A reward model has `score.weight`, as transformers' sequence
classification names it, in place of `lm_head.weight`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from configs.load import describe_problems
from configs.schema import ModelRecipe
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes, stacked_name, wrong_shape
from model.formats.safetensors_writer import write_safetensors
from model.formats.weight_files import INDEX_FILE, SINGLE_FILE, open_safetensors, read_json, tensor_files, tensor_names

CONFIG_FILE = "config.json"
VOCABULARY_KEY = "vocabulary_sha256"
"""Of config.json: which token each id stands for. Checkpoints of other programs do not have it."""
ROUTER_BIAS = "e_score_correction_bias"
_CONSTANTS = {"hidden_act": "silu", "attention_dropout": 0.0, "rope_scaling": None}
"""Keys of config.json that this architecture does not vary."""
CAUSAL_LM, REWARD_MODEL = "Glm4MoeForCausalLM", "Glm4MoeForSequenceClassification"
_MTP_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def config_dict(
    recipe: ModelRecipe, *, dtype: torch.dtype, eos_token_ids: Sequence[int], pad_token_id: int, is_scored: bool = False
) -> dict[str, object]:
    """config.json's content, keys sorted; `is_scored` for a reward model, whose one label is the score."""
    fixed = {
        "architectures": [REWARD_MODEL if is_scored else CAUSAL_LM],
        "model_type": "glm4_moe",
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": list(eos_token_ids),
        "pad_token_id": pad_token_id,
        "use_cache": True,
    }
    labels = {"id2label": {"0": "score"}, "label2id": {"score": 0}} if is_scored else {}
    return dict(sorted((recipe.model_dump() | _CONSTANTS | fixed | labels).items()))


class Writer(NamedTuple):
    """Which files of a directory this process writes, where several write it together: every n-th, the first one also
    what describes them."""

    index: int
    num_writers: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def writes(self, number: int) -> bool:
        """Whether file `number`, counted from 1, is this process's."""
        return (number - 1) % self.num_writers == self.index


ALONE = Writer(0, 1)


def write_checkpoint(
    read: Callable[[str], Tensor],
    shapes: Mapping[str, torch.Size],
    config: Mapping[str, object],
    checkpoint_dir: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    writer: Writer = ALONE,
) -> list[str]:
    """Write the tensors of these names and shapes, each read once by its name, one in memory at a time; all but the
    router biases are cast to `dtype`; those stay float32. Equal input, equal bytes. Returns the names of all files."""
    checkpoint_dir.mkdir(parents=True, exist_ok=True)
    shards = plan_shards(shapes, dtype, max_shard_bytes)
    files = {}
    for number, names in enumerate(shards, 1):
        file_name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        layout = {name: (shapes[name], stored_dtype(name, dtype)) for name in names}
        if writer.writes(number):
            write_safetensors(checkpoint_dir / file_name, layout, read)
        files.update(dict.fromkeys(names, file_name))
    written = sorted(set(files.values()))
    if len(shards) > 1:
        total = sum(_stored_bytes(name, shape, dtype) for name, shape in shapes.items())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        if writer.is_first:
            (checkpoint_dir / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        written.append(INDEX_FILE)
    if writer.is_first:
        (checkpoint_dir / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    return [*written, CONFIG_FILE]


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype on disk of a tensor in a checkpoint of this dtype."""
    return torch.float32 if name.endswith(ROUTER_BIAS) else dtype


def _stored_bytes(name: str, shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * stored_dtype(name, dtype).itemsize


def plan_shards(shapes: Mapping[str, torch.Size], dtype: torch.dtype, max_shard_bytes: int) -> list[list[str]]:
    """Names per shard, in the given order; a tensor larger than a shard gets one of its own."""
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes must be positive, is {max_shard_bytes}")
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = _stored_bytes(name, shape, dtype)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def read_config(checkpoint_dir: Path) -> ModelRecipe:
    """The architecture of a checkpoint directory; what this code cannot run (another model type, rope scaling,
    quantized weights) is refused by name. transformers counts the MTP layer in config.json also where it left it out:
    the tensors decide."""
    config = read_json(checkpoint_dir / CONFIG_FILE)
    path = checkpoint_dir / CONFIG_FILE
    if config.get("model_type") != "glm4_moe":
        raise ValueError(
            f"{path}: model_type is {config.get('model_type')!r}, must be 'glm4_moe' (GLM-4.5, GLM-4.5-Air, GLM-4.6)"
        )
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "an unknown method") if isinstance(quantization, dict) else "unknown"
        raise ValueError(f"{path}: the weights are quantized ({method}): give the same model in bfloat16 or float32")
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{path}: rope_parameters is {rope!r}, no object: copy the file again")
    # transformers 5 writes both inside rope_parameters, where they win over top-level keys (modeling_rope_utils.py).
    config = config | {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{path}: rope_type {rope['rope_type']!r} is not supported, only 'default'")
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "default":
        config["rope_scaling"] = None
    for key, value in _CONSTANTS.items():
        if config.get(key, value) != value:
            raise ValueError(f"{path}: {key} is {config[key]!r}, only {value!r} is supported")
    if "num_mtp_layers" in config:
        config.setdefault("num_nextn_predict_layers", config["num_mtp_layers"])
    if config.get("num_nextn_predict_layers") and _lacks_mtp(checkpoint_dir, config.get("num_hidden_layers")):
        config["num_nextn_predict_layers"] = 0
    width, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("head_dim") is None and isinstance(width, int) and isinstance(num_heads, int) and num_heads > 0:
        config["head_dim"] = width // num_heads  # as transformers has it where the key is absent
    if config.get("num_nextn_predict_layers") is None and _lacks_mtp(checkpoint_dir, config.get("num_hidden_layers")):
        config["num_nextn_predict_layers"] = 0
    absent = sorted(set(ModelRecipe.model_fields) - set(config))
    if absent:
        raise ValueError(f"{path}: keys {absent} are missing; add them with the values the weights were trained with")
    try:
        return ModelRecipe.model_validate({key: config[key] for key in ModelRecipe.model_fields})
    except ValidationError as error:
        raise ValueError(f"{path}: this architecture is not supported: {describe_problems(error)}") from error


def is_reward_model(checkpoint_dir: Path) -> bool:
    """Whether a directory's config.json says that it holds a reward model."""
    return read_json(checkpoint_dir / CONFIG_FILE).get("architectures") == [REWARD_MODEL]


def _lacks_mtp(checkpoint_dir: Path, num_hidden_layers: object) -> bool:
    """Whether a directory holds weights, and none of the layer after the last."""
    if not any((checkpoint_dir / name).is_file() for name in (INDEX_FILE, SINGLE_FILE)):
        return False
    prefix = f"model.layers.{num_hidden_layers}."
    return not any(name.startswith(prefix) for name in tensor_names(checkpoint_dir))


def canonical_config(checkpoint_dir: Path) -> dict[str, object]:
    """A directory's config.json with every key of the architecture at the top, as glm46 writes it; keys of other
    programs are kept. The weights are not quantized: read_config refuses such."""
    config = read_json(checkpoint_dir / CONFIG_FILE)
    left_out = ("rope_parameters", "num_mtp_layers", "quantization_config")
    kept = {key: value for key, value in config.items() if key not in left_out}
    return dict(sorted((kept | read_config(checkpoint_dir).model_dump() | _CONSTANTS).items()))


class CheckpointTensors:
    """The tensors of a checkpoint directory under their names on disk, accounted for by the headers of its files before
    any is read: a missing, unexpected or wrongly shaped one and a router bias that is not float32 are ValueErrors that
    name it."""

    def __init__(self, checkpoint_dir: Path, recipe: ModelRecipe, is_scored: bool = False) -> None:
        if is_reward_model(checkpoint_dir) != is_scored:
            kinds = ("a language model", "a reward model")
            raise ValueError(
                f"{checkpoint_dir} holds {kinds[not is_scored]}, {kinds[is_scored]} is needed here: name another "
                f"checkpoint"
            )
        self.files = tensor_files(checkpoint_dir)
        with torch.device("meta"):
            shapes = checkpoint_shapes(Glm4Moe(recipe, is_scored=is_scored))
        copies = mtp_copies(recipe) if recipe.num_nextn_predict_layers else {}
        for name in sorted(set(shapes) - set(self.files)):
            raise ValueError(
                f"{checkpoint_dir}: tensor {name} is missing; {CONFIG_FILE} belongs to another model or a file was lost"
            )
        for name in sorted(set(self.files) - set(shapes) - set(copies)):
            with open_safetensors(self.files[name]) as file:
                # transformers writes shared experts of width 0 where there are none.
                if 0 in file.get_slice(name).get_shape():
                    continue
            raise ValueError(
                f"{self.files[name]}: unexpected tensor {name}; {CONFIG_FILE} belongs to another model or layout"
            )
        for path, names in self._by_file(set(self.files) & (set(shapes) | set(copies))):
            with open_safetensors(path) as file:
                for name in names:
                    _check_header(file.get_slice(name), name, path, shapes[copies.get(name, name)])
        self._wanted = set(shapes)
        self._refuse_other_copies({name: trunk for name, trunk in copies.items() if name in self.files}, recipe)

    def names(self) -> set[str]:
        """Names of the model's tensors; the copies of GLM-4.5's MTP layer are left out."""
        return self._wanted

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """One whole tensor in memory of its own: a view of it does not keep the file mapped."""
        with open_safetensors(self.files[name]) as file:
            tensor = file.get_tensor(name).clone()
        assert tensor.shape == shape, (name, tensor.shape, shape)
        return tensor

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All of them, file by file: one tensor is in memory at a time, and one file is mapped."""
        for path, names in self._by_file(self._wanted):
            with open_safetensors(path) as file:
                for name in names:
                    yield name, file.get_tensor(name)

    def _by_file(self, wanted: set[str]) -> list[tuple[Path, list[str]]]:
        """The files that hold these tensors, each with their names."""
        by_file: dict[Path, list[str]] = {}
        for name in sorted(wanted):
            by_file.setdefault(self.files[name], []).append(name)
        return sorted(by_file.items())

    def _refuse_other_copies(self, copies: Mapping[str, str], recipe: ModelRecipe) -> None:
        for name, trunk_name in sorted(copies.items()):
            with open_safetensors(self.files[name]) as file, open_safetensors(self.files[trunk_name]) as trunk:
                if not torch.equal(file.get_tensor(name), trunk.get_tensor(trunk_name)):
                    raise ValueError(
                        f"{self.files[name]}: {name} differs from {trunk_name}, but the MTP layer shares it with the "
                        f"trunk here: remove the tensors of layer {recipe.num_hidden_layers} and set "
                        f"num_nextn_predict_layers to 0"
                    )


@torch.no_grad()
def load_weights(model: Glm4Moe, checkpoint_dir: Path) -> None:
    """Copy a checkpoint into the model, tensor by tensor, cast to the model's dtypes. Peak memory is the model's and
    one file's."""
    state = model.state_dict()
    for name, tensor in CheckpointTensors(checkpoint_dir, model.recipe, model.is_scored):
        ours, expert = stacked_name(name)
        (state[ours] if expert is None else state[ours][expert]).copy_(tensor)


def mtp_copies(recipe: ModelRecipe) -> dict[str, str]:
    """The tensors that GLM-4.5's layout repeats in the MTP layer, and what they repeat."""
    prefix = f"model.layers.{recipe.num_hidden_layers}."
    return {prefix + suffix: trunk_name for suffix, trunk_name in _MTP_COPIES.items()}


def _check_header(header: Any, name: str, path: Path, shape: torch.Size) -> None:
    if tuple(header.get_shape()) != tuple(shape):
        raise ValueError(f"{path}: {wrong_shape(name, tuple(header.get_shape()), tuple(shape))}")
    if name.endswith(ROUTER_BIAS) and header.get_dtype() != "F32":
        raise ValueError(
            f"{path}: {name} is {header.get_dtype()}, must be float32 (rounding it selects other experts): export it "
            f"again"
        )


def load_model(
    checkpoint_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    is_scored: bool = False,
) -> Glm4Moe:
    """Build the model a checkpoint directory describes, load its weights, and set it to evaluation. Router biases stay
    float32: rounded they select other experts. Raises ValueError for a reward model unless `is_scored`."""
    with torch.device("meta"):
        model = Glm4Moe(read_config(checkpoint_dir), is_scored=is_scored)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model = model.to_empty(device=device)
    load_weights(model, checkpoint_dir)
    return model.eval()
