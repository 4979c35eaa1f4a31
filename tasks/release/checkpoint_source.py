"""Opens what `glm46 convert` reads: a Hugging Face directory, a hand-over, a Megatron-Core or a DeepSpeed one.

Each is accounted for before a tensor is read: a missing, unexpected or wrongly shaped one is a ValueError with its
name. A transposed square matrix has the right shape, and nothing tells it from the right one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from configs.schema import ModelRecipe
from model.architecture.transformer import Glm4Moe
from model.formats.adapter_files import refuse_adapter
from model.formats.checkpoint_names import checkpoint_shapes, stacked_name
from model.formats.deepspeed_checkpoint import DeepSpeedFiles, step_dir
from model.formats.hf_checkpoint import (
    CONFIG_FILE,
    ROUTER_BIAS,
    VOCABULARY_KEY,
    CheckpointTensors,
    canonical_config,
    is_reward_model,
    read_config,
    stored_dtype,
)
from model.formats.megatron_checkpoint import MegatronFiles, iteration_dir
from model.formats.weight_files import open_safetensors
from model.text.tokenizer_layout import END_TOKENS, vocabulary_sha256
from tasks.training.state.tensor_sources import StateFiles, TensorSource

Format = Literal["hf", "native", "megatron", "deepspeed"]
HANDOVER, HF = "handover", "hf"
TOKENIZER_FILE = "tokenizer.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class CheckpointSource:
    """A model on disk, of which nothing is loaded."""

    path: Path
    format: Format
    recipe: ModelRecipe
    is_scored: bool
    dtype: torch.dtype
    """Of a Hugging Face directory with these weights; router biases are float32 in any."""
    config: dict[str, object]
    """What its config.json says."""
    config_dir: Path
    """Where config.json, tokenizer and chat template are."""
    shapes: dict[str, torch.Size]
    """Of all tensors, sorted by checkpoint name."""
    tensors: TensorSource
    adapter: str = ""
    """Directory of the adapter that is merged in; empty where none is."""

    def stored(self, name: str) -> Tensor:
        """One tensor as it is on disk: masters are float32. Raises ValueError where a number is not finite."""
        tensor = self.tensors.read(name, self.shapes[name])
        if not tensor.isfinite().all():
            raise ValueError(f"{self.path}: tensor {name} has numbers that are not finite: take an earlier checkpoint")
        return tensor

    def read(self, name: str) -> Tensor:
        """One tensor in its dtype of a Hugging Face directory, to which masters are rounded."""
        return self.stored(name).to(stored_dtype(name, self.dtype))

    @torch.no_grad()
    def load(self, dtype: torch.dtype = torch.float32) -> Glm4Moe:
        """The model with the numbers on disk, on the CPU, set to evaluation; router biases stay float32."""
        with torch.device("meta"):
            model = Glm4Moe(self.recipe, is_scored=self.is_scored)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model = model.to_empty(device="cpu")
        state = model.state_dict()
        for name in self.shapes:
            ours, expert = stacked_name(name)
            (state[ours] if expert is None else state[ours][expert]).copy_(self.stored(name))
        return model.eval()


def open_source(path: Path) -> CheckpointSource:
    """Raises ValueError for a directory that is none of the four, and where its parts do not belong together."""
    config_dir = path / HF if (path / HANDOVER).is_dir() else path
    refuse_adapter(config_dir)
    if not (config_dir / CONFIG_FILE).is_file():
        raise ValueError(
            f"{path} is no checkpoint: name a directory with {CONFIG_FILE} and weights, one with {HANDOVER}/ and "
            f"{HF}/{CONFIG_FILE}, or one of Megatron-Core or DeepSpeed with {CONFIG_FILE} and the tokenizer beside it"
        )
    recipe, is_scored = read_config(config_dir), is_reward_model(config_dir)
    with torch.device("meta"):
        shapes = dict(sorted(checkpoint_shapes(Glm4Moe(recipe, is_scored=is_scored)).items()))
    kind, tensors, dtype = _open_tensors(path, config_dir, recipe, is_scored, shapes)
    _refuse_other_tokenizer(config_dir, recipe)
    config = canonical_config(config_dir)
    return CheckpointSource(path, kind, recipe, is_scored, dtype, config, config_dir, shapes, tensors)


def _open_tensors(
    path: Path, config_dir: Path, recipe: ModelRecipe, is_scored: bool, shapes: dict[str, torch.Size]
) -> tuple[Format, TensorSource, torch.dtype]:
    if config_dir != path:
        masters = StateFiles(path / HANDOVER, "master")
        if masters.names() or not any(config_dir.glob("*.safetensors")):
            _account(path / HANDOVER, shapes, masters.names())
            return "native", masters, _configured_dtype(config_dir)
    if iteration_dir(path) is not None:
        files = MegatronFiles(path, recipe, shapes)
        return "megatron", files, _configured_dtype(config_dir)
    step = None if any(config_dir.glob("*.safetensors")) else step_dir(path)
    if step is not None:
        return "deepspeed", DeepSpeedFiles(step, recipe, shapes), _configured_dtype(config_dir)
    tensors = CheckpointTensors(config_dir, recipe, is_scored)
    return "hf", tensors, _stored_dtype_of(tensors)


def _account(path: Path, shapes: dict[str, torch.Size], names: set[str]) -> None:
    for name in sorted(set(shapes) ^ names):
        problem = "missing" if name in shapes else "unexpected"
        raise ValueError(
            f"{path}: tensor {name} is {problem}: {CONFIG_FILE} belongs to another model or a file is lost"
        )


def _configured_dtype(config_dir: Path) -> torch.dtype:
    config = json.loads((config_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    named = config.get("dtype") or config.get("torch_dtype")
    for dtype in _DTYPES.values():
        if str(dtype) == f"torch.{named}":
            return dtype
    raise ValueError(f"{config_dir / CONFIG_FILE}: dtype is {named!r}: write float32, bfloat16 or float16")


def _stored_dtype_of(tensors: CheckpointTensors) -> torch.dtype:
    """The one dtype of the weights, by the headers: casting some of them would change the model unseen."""
    first: tuple[str, str] | None = None
    for name in sorted(tensors.names()):
        if name.endswith(ROUTER_BIAS):
            continue
        with open_safetensors(tensors.files[name]) as file:
            found = file.get_slice(name).get_dtype()
        first = first or (name, found)
        if found != first[1] or found not in _DTYPES:
            raise ValueError(
                f"{tensors.files[name]}: tensor {name} is {found} and {first[0]} {first[1]}: give all weights in one "
                f"of {', '.join(_DTYPES)}"
            )
    assert first is not None, tensors
    return _DTYPES[first[1]]


def _refuse_other_tokenizer(config_dir: Path, recipe: ModelRecipe) -> None:
    """The ids at which the model ends an answer, by config.json, must be those of the tokenizer's end tokens, and every
    id must stand for the token that it was trained as, where config.json says which."""
    path = config_dir / TOKENIZER_FILE
    if not path.is_file():
        return
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for a damaged file
        raise ValueError(f"{path} cannot be read ({error}): copy the model's own tokenizer beside it") from error
    config = json.loads((config_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    configured = config.get("eos_token_id")
    wanted = set(configured if isinstance(configured, list) else [configured]) - {None}
    held = {tokenizer.token_to_id(token) for token in END_TOKENS}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > recipe.vocab_size or not wanted <= held:
        raise ValueError(
            f"{path} is the tokenizer of another model: it has {size} tokens and ends answers with "
            f"{sorted(map(str, held))}, {CONFIG_FILE} has vocab_size {recipe.vocab_size}, eos_token_id {configured}: "
            f"copy the model's own tokenizer beside it"
        )
    if VOCABULARY_KEY in config and vocabulary_sha256(tokenizer) != config[VOCABULARY_KEY]:
        raise ValueError(
            f"{path} is the tokenizer of another model: its ids stand for other tokens than those that the model was "
            f"trained with ({VOCABULARY_KEY} in {CONFIG_FILE}): copy the model's own tokenizer beside it"
        )
