"""Accounts for the tensors of a quantized checkpoint: each is quantized where its format says so, and else the one that
it was made of.

A matrix NAME is written by compressed-tensors as its codes and their scales, each with a name that begins with NAME.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from model.formats.expert_coverage import ExpertCoverage

if TYPE_CHECKING:
    from configs.schema import QuantizedFormat

WEIGHTS = "*.safetensors"
PARTS = ("_scale", "_packed", "_shape", "_zero_point", "_g_idx")
"""What compressed-tensors writes of a matrix, after its name."""
CODES = {8: torch.float8_e4m3fn, 4: torch.int32}
"""Dtype of quantized weights by their bits; of 4 bits, eight are packed in a number."""


@dataclass(frozen=True)
class QuantizedTensors:
    """What became of the tensors of the checkpoint."""

    num_quantized: int
    num_expert_matrices: int
    """Of those, matrices of routed experts."""
    num_kept: int
    """Tensors that are bit for bit those of the checkpoint."""
    num_rescaled: int
    """Tensors that AWQ divided by what it multiplied the following matrices with."""
    num_calibration_tokens: int
    """Tokens that every routed expert saw; 0 where the format needs none."""
    coverage: ExpertCoverage
    """By these tokens; of no expert where there are none."""


def num_weight_bits(quantized_format: str) -> int:
    """Bits of a quantized weight, without its share of a scale."""
    return 8 if quantized_format.startswith("FP8") else 4


@contextlib.contextmanager
def open_tensors(directory: Path) -> Iterator[dict[str, Any]]:
    """The open file of each tensor, by its name."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in sorted(directory.glob(WEIGHTS))]
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118


def quantized_matrices(config: dict[str, Any], quantized_format: QuantizedFormat) -> set[str]:
    """Names of the matrices that a format quantizes, of a model with this config.json."""
    names: set[str] = set()
    for layer in range(config["num_hidden_layers"]):
        prefix, blocks = f"model.layers.{layer}", []
        if layer >= config["first_k_dense_replace"]:
            blocks = [f"mlp.experts.{expert}" for expert in range(config["n_routed_experts"])]
            blocks += ["mlp.shared_experts"] if config["n_shared_experts"] else []
        elif quantized_format != "FP8_EXPERTS":
            blocks = ["mlp"]
        names |= {f"{prefix}.{block}.{each}_proj.weight" for block in blocks for each in ("gate", "up", "down")}
        if quantized_format != "FP8_EXPERTS":
            names |= {f"{prefix}.self_attn.{each}_proj.weight" for each in "qkvo"}
    return names


def account_for(
    checkpoint_dir: Path,
    quantized_dir: Path,
    quantized_format: QuantizedFormat,
    num_calibration_tokens: int,
    coverage: ExpertCoverage,
) -> QuantizedTensors:
    """Find every tensor of the checkpoint in the result: quantized where the format says so, else equal in dtype and
    bits, or rescaled by AWQ. Raises ValueError for any that is none of these, and for a new one."""
    config = json.loads((checkpoint_dir / "config.json").read_text(encoding="utf-8"))
    expected, num_bits = quantized_matrices(config, quantized_format), num_weight_bits(quantized_format)
    num_kept, rescaled, wrong = 0, [], []
    with open_tensors(checkpoint_dir) as before, open_tensors(quantized_dir) as after:
        wrong += [f"{name} is missing in the checkpoint" for name in sorted(expected - set(before))]
        wrong += [f"{name} is new" for name in after if _matrix_of(name) not in before]
        for name, file in before.items():
            codes = f"{name}_packed" if num_bits == 4 else name
            if name in expected:
                is_quantized = f"{name}_scale" in after and codes in after
                if not is_quantized or after[codes].get_tensor(codes).dtype != CODES[num_bits]:
                    wrong.append(f"{name} is not quantized")
            elif name not in after or f"{name}_scale" in after:
                wrong.append(f"{name} is {'missing' if name not in after else 'quantized'}")
            else:
                ours, theirs = after[name].get_tensor(name), file.get_tensor(name)
                if ours.dtype == theirs.dtype and torch.equal(ours, theirs):
                    num_kept += 1
                elif quantized_format == "AWQ_W4A16" and name.endswith("layernorm.weight"):
                    rescaled.append(name)
                else:
                    wrong.append(f"{name} is changed")
    if wrong:
        raise ValueError(
            f"{quantized_format} lost or changed {len(wrong)} tensors of {checkpoint_dir}, first {wrong[:3]}: leave it "
            "out of release.recipe.quantized_formats, and report the versions of llmcompressor and transformers"
        )
    num_experts = sum(".mlp.experts." in name for name in expected)
    return QuantizedTensors(len(expected), num_experts, num_kept, len(rescaled), num_calibration_tokens, coverage)


def _matrix_of(name: str) -> str:
    """The name of the checkpoint's tensor of which this one is a part."""
    return next((name.removesuffix(part) for part in PARTS if name.endswith(part)), name)
