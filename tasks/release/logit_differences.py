"""Compares the logits of an export with those of its source, by every engine of this machine that reads the export."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.architecture.counts import count_parameters
from tasks.release.checkpoint_source import CheckpointSource, open_source
from tasks.release.gguf_comparison import compare_served

if TYPE_CHECKING:
    from torch import Tensor

MAX_COMPARED_PARAMETERS = 1_000_000_000
"""Parameters up to which both models are loaded, in float32, to compare their logits."""
NUM_COMPARED_TOKENS = 32
OURS, TRANSFORMERS, LLAMA_CPP = "glm46", "transformers", "llama.cpp"


def logit_differences(source: CheckpointSource, target: Path, target_format: str) -> tuple[dict[str, float], str]:
    """By engine, the largest difference between its logits of the export and ours of the source, over one text of
    random tokens: our own code of every directory, transformers of hf; of a GGUF file llama.cpp's log-probabilities
    of the same tokens. Or why there is none."""
    num_parameters = count_parameters(source.recipe).total
    if source.is_scored or num_parameters > MAX_COMPARED_PARAMETERS:
        why = "a reward model has none" if source.is_scored else f"{num_parameters:,} parameters in float32, twice"
        return {}, why
    generator = torch.Generator().manual_seed(0)
    num_tokens = min(NUM_COMPARED_TOKENS, source.recipe.max_position_embeddings)
    token_ids_BT = torch.randint(0, source.recipe.vocab_size, (1, num_tokens), generator=generator)
    with torch.inference_mode():
        wanted_BTV = source.load()(token_ids_BT).logits_BTV
        if target_format == "gguf":
            return {LLAMA_CPP: compare_served(target, source, token_ids_BT[0], wanted_BTV[0])}, ""
        found = {OURS: open_source(target).load()(token_ids_BT).logits_BTV}
        if target_format == "hf":
            found[TRANSFORMERS] = _of_transformers(target, token_ids_BT)
    return {engine: float((logits_BTV - wanted_BTV).abs().max()) for engine, logits_BTV in found.items()}, ""


def _of_transformers(target: Path, token_ids_BT: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    with contextlib.ExitStack() as stack:
        stack.callback(logging.set_verbosity, verbosity)
        stack.callback(logging.enable_progress_bar)
        logging.set_verbosity_error()  # it lists the tensors of the MTP layer, which it does not know
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return model(input_ids=token_ids_BT).logits
