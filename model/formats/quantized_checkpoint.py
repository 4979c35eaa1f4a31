"""Writes a checkpoint with quantized matrices, as vLLM, SGLang and transformers read it.

The layout is that of compressed-tensors; llm-compressor quantizes. Attention, dense MLPs and all experts, routed and
shared, are quantized; by FP8_EXPERTS only the experts. Embeddings, head, norms, biases, the router with its float32
bias, and the MTP layer stay as they are: transformers does not know the MTP layer, so its tensors are copied into a
file of their own.

FP8 reads no text and is written file by file, in the memory of one file. Formats of 4 bits load the checkpoint whole
and in float32, 4 bytes per parameter: 436 GB of memory for GLM-4.5-Air, 1.4 TB for GLM-4.6. What is kept is written in
the dtype that it had. Scales are float32.

Every expert sees every calibration token, whatever the router chooses: an expert that few tokens reach would else be
rounded blindly. AWQ scales the inputs of a matrix and divides the norm or matrix before it by the same numbers. The
norm before experts is not changed: the router reads it, too, and stays bit for bit the trained one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from configs.schema import CALIBRATED_FORMATS
from model.formats.expert_coverage import expert_coverage
from model.formats.quantized_model import load_linear, mtp_prefix, named_routers, quiet_libraries
from model.formats.quantized_tensors import WEIGHTS, QuantizedTensors, account_for, open_tensors, quantized_matrices
from model.formats.weight_files import INDEX_FILE, tensor_files

if TYPE_CHECKING:
    from configs.schema import QuantizedFormat

SCHEMES: dict[QuantizedFormat, str] = {
    "FP8_DYNAMIC": "FP8_DYNAMIC",
    "FP8_BLOCK": "FP8_BLOCK",
    "FP8_EXPERTS": "FP8_DYNAMIC",
    "GPTQ_W4A16": "W4A16",
    "AWQ_W4A16": "W4A16_ASYM",
}
"""The preset of compressed-tensors: e4m3 with a scale per output or per 128 x 128 block and activations scaled per
token or group as they come; or 4-bit integers in groups of 128 inputs, symmetric, or with a zero point."""
MTP_FILE = "model-mtp.safetensors"
MAX_SHARD_BYTES = 4 << 30
COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
ROUTER, HEAD, EMBEDDINGS = r"re:.*\.mlp\.gate$", "lm_head", "model.embed_tokens"
BESIDE_EXPERTS = (r"re:.*\.self_attn\..*", r"re:.*\.mlp\.(gate|up|down)_proj$")
"""Attention and dense MLPs: what they round changes the input of every router after them."""


def write_quantized(
    checkpoint_dir: Path,
    quantized_dir: Path,
    quantized_format: QuantizedFormat,
    rows: Sequence[Sequence[int]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> QuantizedTensors:
    """`rows` are token ids to calibrate with, none for formats that do not. `max_shard_bytes` bounds the files of
    formats of 4 bits; others have the checkpoint's. Raises ValueError where a tensor of the checkpoint is missing in
    the result, another matrix is quantized than the format says, or another tensor changed."""
    config = json.loads((checkpoint_dir / "config.json").read_text(encoding="utf-8"))
    quantized_dir.mkdir(parents=True, exist_ok=True)
    if quantized_format not in CALIBRATED_FORMATS:
        _quantize_files(checkpoint_dir, quantized_dir, quantized_format, config)
        return account_for(checkpoint_dir, quantized_dir, quantized_format, 0, expert_coverage({}))
    with quiet_libraries():
        model = load_linear(checkpoint_dir)
        coverage = expert_coverage(_routed_tokens(model, rows))
        _calibrate(model, quantized_format, config, rows)
        _restore_dtypes(model, checkpoint_dir)
        model.save_pretrained(quantized_dir, save_compressed=True, max_shard_size=max_shard_bytes)
    (quantized_dir / "recipe.yaml").unlink(missing_ok=True)
    for path in quantized_dir.glob(WEIGHTS):
        path.chmod(0o644)
    for name in COPIED_FILES:
        if (checkpoint_dir / name).exists():
            shutil.copyfile(checkpoint_dir / name, quantized_dir / name)
    _write_mtp(checkpoint_dir, quantized_dir, config)
    return account_for(checkpoint_dir, quantized_dir, quantized_format, sum(map(len, rows)), coverage)


def _quantize_files(
    checkpoint_dir: Path, quantized_dir: Path, quantized_format: QuantizedFormat, config: dict[str, Any]
) -> None:
    """Each file of the checkpoint becomes one of the same name; no model is made. Raises ValueError for a missing or
    damaged file."""
    tensor_files(checkpoint_dir)
    kept = [HEAD, ROUTER, EMBEDDINGS, _mtp_pattern(config)]
    kept += BESIDE_EXPERTS if quantized_format == "FP8_EXPERTS" else ()
    with quiet_libraries():
        from llmcompressor.entrypoints.model_free import model_free_ptq

        model_free_ptq(
            checkpoint_dir,
            quantized_dir,
            scheme=SCHEMES[quantized_format],
            ignore=kept,
            device="cpu",
            converter=_InFloat32(quantized_matrices(config, quantized_format)),
        )


class _InFloat32:
    """A converter of compressed-tensors, before its own: a scale has the dtype of its matrix."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def process(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.float() if name in self.names else tensor for name, tensor in tensors.items()}

    validate = process

    def update_config(self, config: Any) -> Any:
        return config

    def update_model_config(self, model_config: dict[str, Any]) -> dict[str, Any]:
        return model_config

    def get_dependencies(self, weight_name: str) -> set[str]:
        return set()


def _calibrate(
    model: Any, quantized_format: QuantizedFormat, config: dict[str, Any], rows: Sequence[Sequence[int]]
) -> None:
    """Quantize in place. Raises ValueError where an expert did not see all tokens."""
    from llmcompressor.entrypoints.oneshot import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    matrices: dict[str, Any] = {"targets": "Linear", "scheme": SCHEMES[quantized_format], "ignore": [HEAD, ROUTER]}
    if quantized_format == "GPTQ_W4A16":
        recipe: Any = GPTQModifier(**matrices)
    else:
        mappings = [AWQMapping(smooth, balance) for smooth, balance in _awq_names(config)]
        recipe = [AWQModifier(mappings=mappings, duo_scaling=False), QuantizationModifier(**matrices)]
    seen, num_tokens = _count_expert_tokens(model), sum(map(len, rows))
    oneshot(
        model=model,
        recipe=recipe,
        dataset=_dataset(rows),
        num_calibration_samples=len(rows),
        max_seq_length=max(map(len, rows)),
        shuffle_calibration_samples=False,
    )
    if idle := [name for name, count in seen.items() if count < num_tokens]:
        raise ValueError(
            f"{quantized_format}: {len(idle)} experts saw fewer than {num_tokens} calibration tokens, first "
            f"{idle[0]}: report the version of llmcompressor"
        )


def _mtp_pattern(config: dict[str, Any]) -> str:
    return f"re:{re.escape(mtp_prefix(config))}.*"


def _restore_dtypes(model: nn.Module, checkpoint_dir: Path) -> None:
    """Give what is not quantized the dtype that it has in the checkpoint: loaded, all is float32."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with open_tensors(checkpoint_dir) as files:
        for name, tensor in tensors.items():
            if name in files and f"{name}_scale" not in tensors:
                tensor.data = tensor.data.to(files[name].get_tensor(name).dtype)


def _awq_names(config: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """What is divided, and the matrices that are multiplied by the same numbers. Of layers with experts only the pairs
    inside attention and inside an expert."""
    dense = "|".join(str(layer) for layer in range(config["first_k_dense_replace"]))
    pairs = [
        (r"re:.*input_layernorm$", [r"re:.*q_proj$", r"re:.*k_proj$", r"re:.*v_proj$"]),
        (r"re:.*up_proj$", [r"re:.*down_proj$"]),
    ]
    if dense:
        layer = rf"re:.*layers\.({dense})\."
        pairs.append((f"{layer}post_attention_layernorm$", [f"{layer}mlp.gate_proj$", f"{layer}mlp.up_proj$"]))
    return pairs


def _routed_tokens(model: nn.Module, rows: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    """By layer the tokens that its router sends to each expert."""
    routed: dict[int, Tensor] = {}

    def count(layer: int, num_experts: int) -> Any:
        def hook(_module: nn.Module, _inputs: tuple[Tensor, ...], result: tuple[Tensor, ...]) -> None:
            routed[layer] = routed.get(layer, 0) + result[2].flatten().bincount(minlength=num_experts)

        return hook

    routers = {int(name.split(".")[-3]): module for name, module in named_routers(model)}
    handles = [
        router.register_forward_hook(count(layer, router.get_parameter("weight").shape[0]))
        for layer, router in routers.items()
    ]
    with torch.inference_mode():
        for row in filter(None, rows):
            model(input_ids=torch.tensor([row]))
    for handle in handles:
        handle.remove()
    return routed


def _count_expert_tokens(model: nn.Module) -> dict[str, int]:
    """Filled while the model computes: tokens that each routed expert has seen, in all passes."""
    seen: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] += inputs[0].shape[:-1].numel()

        return hook

    for name, module in model.named_modules():
        if ".mlp.experts." in name and name.endswith("gate_proj"):
            seen[name] = 0
            module.register_forward_pre_hook(count(name))
    return seen


def _dataset(rows: Sequence[Sequence[int]]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(
        {"input_ids": [list(row) for row in rows], "attention_mask": [[1] * len(row) for row in rows]}
    )


def _write_mtp(checkpoint_dir: Path, quantized_dir: Path, config: dict[str, Any]) -> None:
    """Copy the tensors of the MTP layer, and name all tensors in an index."""
    prefix = mtp_prefix(config)
    with open_tensors(checkpoint_dir) as files:
        tensors = {name: file.get_tensor(name) for name, file in files.items() if name.startswith(prefix)}
    if not tensors:
        return
    save_file(tensors, quantized_dir / MTP_FILE, metadata={"format": "pt"})
    placed, size = {}, 0
    for path in quantized_dir.glob(WEIGHTS):
        size += path.stat().st_size
        with safe_open(path, framework="pt") as file:
            placed |= dict.fromkeys(file.keys(), path.name)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
    (quantized_dir / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    settings = json.loads((quantized_dir / "config.json").read_text(encoding="utf-8"))
    settings["quantization_config"]["ignore"].append(_mtp_pattern(config))
    (quantized_dir / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
