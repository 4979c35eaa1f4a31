"""Reads a quantized checkpoint as the model that an engine computes, and the unquantized one in the same code.

The code is transformers', with a Linear for every matrix of every expert; compressed-tensors decodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from model.formats.quantized_tensors import open_tensors


def is_quantized(checkpoint_dir: Path) -> bool:
    """Whether config.json says that weights are quantized."""
    try:
        config = json.loads((checkpoint_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(config.get("quantization_config"))


def load_quantized(quantized_dir: Path) -> nn.Module:
    """The model as its engine computes it: weights of the file's precision, activations rounded where the format rounds
    them. Raises ValueError where a tensor is missing or unknown."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(quantized_dir)
    values = vars(config).pop("quantization_config")
    values.pop("quant_method")
    with quiet_libraries():
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
        from llmcompressor.modeling.moe.linearize import linearize_moe

        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        linearize_moe(model)
        settings = QuantizationConfig.model_validate(values)
        apply_quantization_config(model, settings)
        compressor = ModelCompressor(quantization_config=settings)
        compressor.compress_model(model)
        mtp = mtp_prefix(vars(config))
        with open_tensors(quantized_dir) as files:
            named = {name: file.get_tensor(name) for name, file in files.items() if not name.startswith(mtp)}
        found = model.load_state_dict(named, strict=False)
        if found.missing_keys or found.unexpected_keys:
            raise ValueError(
                f"{quantized_dir}: {len(found.missing_keys)} tensors are missing, {len(found.unexpected_keys)} are "
                f"unknown, first {[*found.missing_keys, *found.unexpected_keys][:3]}: quantize the checkpoint again"
            )
        compressor.decompress_model(model)
    return model.eval()


def load_original(checkpoint_dir: Path) -> nn.Module:
    """The unquantized model, computed by the same code as load_quantized's."""
    with quiet_libraries():
        return load_linear(checkpoint_dir).eval()


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers of the trunk, from the first layer to the last."""
    return [module for _, module in named_routers(model)]


def named_routers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if name.endswith(".mlp.gate")]


def load_linear(checkpoint_dir: Path) -> Any:
    """The checkpoint in transformers' architecture, with a Linear for every matrix of every expert."""
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint_dir, dtype=torch.float32)
    linearize_moe(model)
    return model


def mtp_prefix(config: dict[str, Any]) -> str:
    return f"model.layers.{config['num_hidden_layers']}."


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without the bars and notes of the libraries; on a machine without an accelerator nothing is pinned for one."""
    # Importing them writes to standard output already. Switched off altogether, llm-compressor lacks the level METRIC
    # of its own measurements, and GPTQ fails.
    os.environ |= {"LLM_COMPRESSOR_LOG_LEVEL": "CRITICAL", "COMPRESSED_TENSORS_LOG_DISABLED": "true"}
    import tqdm
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    original = tqdm.tqdm.__init__

    def silent(self: Any, *arguments: Any, **settings: Any) -> None:
        original(self, *arguments, **settings | {"disable": True})

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(tqdm.tqdm, "__init__", silent))
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            if not torch.accelerator.is_available():
                stack.enter_context(patch.object(IntermediatesCache, "pin_memory", lambda *_: None))
            yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
