"""What a plan must know of a model: from a Hugging Face directory, a GGUF file, or a scale that was not trained yet.

Only config.json, an index, or the header of a GGUF file is read.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from configs.schema import ModelRecipe, Scale
from infra.registry.model_registry import model_name
from model.formats.checkpoint_template import checkpoint_template
from model.formats.hf_checkpoint import CONFIG_FILE, read_config
from model.formats.weight_files import tensor_names
from tasks.serving.planned_server import PlannedModel
from tasks.serving.served_bytes import BFLOAT16

QUANTIZATION = "quantization_config"
WEIGHTS = "*.safetensors"
TOKENS, PART = "ggml.tokens", "-{:05d}-of-{:05d}.gguf"
"""Key of a GGUF file that lists its vocabulary; the end of a part's name, by which llama.cpp finds the others."""


def model_of_directory(name: str, directory: Path) -> PlannedModel:
    """A checkpoint of vLLM and SGLang, quantized or not; the weights may still be missing. Raises ValueError for
    another architecture or a format that no plan knows."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory} has no {CONFIG_FILE}: name a checkpoint in the Hugging Face layout, or a GGUF file"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): the file is damaged, copy it again") from error
    quantization = config.pop(QUANTIZATION, None)
    if quantization is None:
        recipe, stored = read_config(directory), BFLOAT16
    else:
        recipe, stored = _unquantized_recipe(directory, config), _stored_format(path, quantization)
    return PlannedModel(name, recipe, stored, checkpoint_template(directory) is not None)


def model_of_gguf(name: str, path: Path) -> PlannedModel:
    """A file of llama.cpp. Its recipe holds only what a plan of llama.cpp reads. Raises ValueError for a file that is
    none."""
    from gguf import GGUFReader

    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a GGUF file, as a finished run leaves one")
    try:
        fields = GGUFReader(path).fields
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is damaged or no GGUF file ({error}): write it again") from error

    def number(key: str) -> int:
        matches = [field for name, field in fields.items() if name.endswith(f".{key}")]
        if not matches:
            raise ValueError(f"{path} names no {key}: give a GGUF file of a glm4moe model")
        # llama.cpp's own converter names no vocab_size: the tokens are the vocabulary.
        return len(matches[0].data) if key == TOKENS else int(matches[0].contents())

    num_mtp = number("nextn_predict_layers")
    recipe = ModelRecipe.model_construct(
        vocab_size=number(TOKENS),
        hidden_size=number("embedding_length"),
        n_routed_experts=number("expert_count"),
        num_experts_per_tok=number("expert_used_count"),
        num_hidden_layers=number("block_count") - num_mtp,
        num_key_value_heads=number("attention.head_count_kv"),
        head_dim=number("attention.key_length"),
        max_position_embeddings=number("context_length"),
        num_nextn_predict_layers=num_mtp,
    )
    is_chat_trained = "tokenizer.chat_template" in fields
    num_parts = int(fields["split.count"].contents()) if "split.count" in fields else 1
    return PlannedModel(name, recipe, "GGUF", is_chat_trained, _size_of_parts(path, num_parts))


def _size_of_parts(path: Path, num_parts: int) -> int:
    """Bytes of a file, with those of the parts that llama.cpp opens after it. Raises ValueError for another part than
    the first, and for one that is missing."""
    if num_parts < 2:
        return path.stat().st_size
    ends = [PART.format(number, num_parts) for number in range(1, num_parts + 1)]
    parts = [path.with_name(path.name.removesuffix(ends[0]) + end) for end in ends]
    if not path.name.endswith(ends[0]) or not all(part.is_file() for part in parts):
        raise ValueError(
            f"{path} is one of {num_parts} parts: name the first, which ends in {ends[0]}, and copy the others beside "
            f"it"
        )
    return sum(part.stat().st_size for part in parts)


def model_of_scale(scale: Scale) -> PlannedModel:
    """The model that a scale would train, in bfloat16."""
    return PlannedModel(model_name(scale.scale), scale.model.recipe, BFLOAT16, is_chat_trained=True)


def require_weights(directory: Path) -> None:
    """Raises ValueError for a directory that can be planned but not served."""
    if not any(directory.glob(WEIGHTS)):
        raise ValueError(f"{directory} holds no weights ({WEIGHTS}): --print plans it, to serve it copy them there")


def _unquantized_recipe(directory: Path, config: dict[str, object]) -> ModelRecipe:
    with tempfile.TemporaryDirectory() as bare:
        Path(bare, CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        recipe = read_config(Path(bare))
    prefix = f"model.layers.{recipe.num_hidden_layers}."
    if any(directory.glob(WEIGHTS)) and not any(name.startswith(prefix) for name in tensor_names(directory)):
        return recipe.model_copy(update={"num_nextn_predict_layers": 0})
    return recipe


def _stored_format(path: Path, quantization: dict) -> str:
    """Of compressed-tensors, as glm46 and the Hub's FP8 checkpoints use it."""
    groups = [group["weights"] for group in quantization.get("config_groups", {}).values() if group.get("weights")]
    described = groups[0] if len(groups) == 1 else {}
    kind = (described.get("type"), described.get("num_bits"), described.get("strategy"))
    if kind == ("float", 8, "block"):
        return "FP8_BLOCK"
    if kind == ("float", 8, "channel"):
        keeps_attention = any("self_attn" in ignored for ignored in quantization.get("ignore", ()))
        return "FP8_EXPERTS" if keeps_attention else "FP8_DYNAMIC"
    if kind == ("int", 4, "group") and described.get("group_size") == 128:
        return "W4A16"
    method = quantization.get("quant_method", "an unknown method")
    raise ValueError(
        f"{path}: {QUANTIZATION} is of {method} with {kind}, a plan knows what glm46 writes with compressed-tensors "
        f"(FP8_DYNAMIC, FP8_EXPERTS, FP8_BLOCK, GPTQ_W4A16, AWQ_W4A16)"
    )
