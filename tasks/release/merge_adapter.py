"""Merges the adapter that a phase left into the weights that it was trained on, and into no others (`glm46 convert`).

In: the model, opened; adapter/ of the phase, which names the weights by their sha256. Out: the model as one that is
converted like any other, each tensor merged when it is read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from infra.storage.store import hash_file
from tasks.release.checkpoint_source import HF, CheckpointSource
from tasks.training.import_checkpoint import checkpoint_files
from tasks.training.state.adapter_export import MergedTensors, WrittenAdapter
from tasks.training.state.trained_checkpoint import WEIGHTS_SUFFIX, weights_sha256


def merge_adapter(source: CheckpointSource, adapter_dir: Path) -> CheckpointSource:
    """The model with an adapter merged in. Raises ValueError where the adapter was trained on other weights."""
    adapter = WrittenAdapter(adapter_dir)
    if source.format != HF:
        raise ValueError(f"{source.path} is of format {source.format}: an adapter is merged into a Hugging Face model")
    files = [file for file in checkpoint_files(source.config_dir) if file.suffix == WEIGHTS_SUFFIX]
    held = weights_sha256({file.name: hash_file(file) for file in files})
    if held != adapter.weights_digest:
        raise ValueError(
            f"{adapter_dir} is an adapter of another model: it was trained on weights with sha256 "
            f"{adapter.weights_digest[:12]}..., those of {source.path} have {held[:12]}...: name the model that its "
            f"phase started from"
        )
    if adapter.kind == "qlora":
        raise ValueError(
            f"{adapter_dir} was trained on weights rounded to 4 bits, which {source.path} does not hold: take hf/ of "
            f"its phase, in which it is merged"
        )
    tensors = MergedTensors(source.tensors, source.shapes, adapter, adapter.scaling)
    return replace(source, tensors=tensors, adapter=str(adapter_dir))
