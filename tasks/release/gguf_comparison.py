"""Reads a GGUF file back and compares every tensor with the checkpoint that it was written from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.release.checkpoint_source import CheckpointSource

EXACT_SHARE = {"F32": 0.0, "BF16": 2.0**-8, "F16": 2.0**-10, "Q8_0": 2.0**-7}
"""The largest rounding of a type, over the tensor's largest magnitude: beyond it a tensor is another one. F16 also
loses what is below its smallest number."""


@dataclass(frozen=True)
class ConvertedTensors:
    """What became of the tensors of a checkpoint in an export."""

    num_equal: int
    num_rounded: int
    num_left_out: int
    largest_rounding: float


def compare_gguf(gguf_path: Path, source: CheckpointSource) -> ConvertedTensors:
    """Raises RuntimeError where a tensor is missing, or differs by more than its type rounds."""
    import gguf
    import torch

    from model.formats.gguf_checkpoint import tensor_sources

    written = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_path).tensors}
    sources = tensor_sources(source.recipe)
    if set(written) != set(sources):
        raise RuntimeError(f"{gguf_path}: tensors {sorted(set(written) ^ set(sources))[:3]} differ: convert again")
    num_equal, num_rounded, largest = 0, 0, 0.0
    for gguf_name, names in sources.items():
        tensor = written[gguf_name]
        parts = [tensor.data] if len(names) == 1 and "_exps" not in gguf_name else list(tensor.data)
        for name, part in zip(names, parts, strict=True):
            # A copy: the file is mapped, and its pages shall not stay in memory.
            found = torch.from_numpy(gguf.dequantize(part.copy(), tensor.tensor_type).copy())
            wanted = source.read(name).float()
            difference = float((found.reshape(wanted.shape) - wanted).abs().max())
            share = difference / max(float(wanted.abs().max()), 1e-30)
            if share > EXACT_SHARE[tensor.tensor_type.name]:
                raise RuntimeError(f"{gguf_path}: {gguf_name} differs from {name} by {difference}: convert again")
            num_equal, num_rounded = num_equal + (difference == 0), num_rounded + (difference > 0)
            largest = max(largest, share)
    num_read = sum(len(names) for names in sources.values())
    return ConvertedTensors(num_equal, num_rounded, len(source.shapes) - num_read, largest)
