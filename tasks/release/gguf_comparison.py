"""Reads a GGUF file back and compares every tensor with the checkpoint that it was written from."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tasks.release.checkpoint_source import CheckpointSource

FILLER = "a"
"""A token of every byte-level tokenizer, of one printable character."""
STARTUP_TIMEOUT_SECONDS = 600.0
EXACT_SHARE = {"F32": 0.0, "BF16": 2.0**-8, "F16": 2.0**-10, "Q8_0": 2.0**-7}
"""The largest rounding of a type, over the tensor's largest magnitude: beyond it a tensor is another one. F16 also
loses what is below its smallest number."""
MEAN_SHARE = {"Q6_K": 0.06, "Q5_K": 0.12, "Q5_0": 0.12, "Q5_1": 0.12, "Q4_K": 0.24}
"""The same for types that an importance matrix weighs, as root mean squares: single weights without importance may be
far off. Normal weights lose a third of it (0.018, 0.037, 0.042, 0.036 and 0.074)."""


@dataclass(frozen=True)
class ConvertedTensors:
    """What became of the tensors of a checkpoint in an export."""

    num_equal: int
    num_rounded: int
    largest_rounding: float
    """Of a tensor, over its size: by the largest magnitude, or by root mean squares of types of 6 bits and fewer."""
    types: dict[str, int] = field(default_factory=dict)
    """Tensors of a GGUF file by their type."""


def compare_gguf(gguf_path: Path, source: CheckpointSource) -> ConvertedTensors:
    """Raises RuntimeError where a tensor is missing, or differs by more than its type rounds."""
    import gguf
    import torch

    from model.formats.gguf_checkpoint import tensor_sources

    written = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_path).tensors}
    sources = tensor_sources(source.recipe)
    if left_out := set(source.shapes) - {name for names in sources.values() for name in names}:
        raise RuntimeError(f"{gguf_path}: {len(left_out)} tensors have no place in GGUF, first {min(left_out)}")
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
            difference = found.reshape(wanted.shape) - wanted
            kind = tensor.tensor_type.name
            order = math.inf if kind in EXACT_SHARE else 2
            share = float(difference.flatten().norm(order)) / max(float(wanted.flatten().norm(order)), 1e-30)
            # Not `share > bound`: a NaN is beyond any bound, too.
            if not share <= (EXACT_SHARE | MEAN_SHARE)[kind]:
                raise RuntimeError(f"{gguf_path}: {gguf_name} differs from {name} by a share of {share}: convert again")
            num_equal, num_rounded = num_equal + (share == 0), num_rounded + (share > 0)
            largest = max(largest, share)
    types = Counter(tensor.tensor_type.name for tensor in written.values())
    return ConvertedTensors(num_equal, num_rounded, largest, {name: types[name] for name in sorted(types)})


def compare_served(gguf_path: Path, source: CheckpointSource, token_ids_T: Tensor, logits_TV: Tensor) -> float:
    """The largest difference between the log-probabilities that llama.cpp gives these tokens and those of the logits of
    the source."""
    import tempfile

    from configs.schema import ServingResources
    from infra.serving.model_server import LOOPBACK, running_model_server
    from tasks.evaluation.engine import load_tokenizer
    from tasks.release.checkpoint_source import TOKENIZER_FILE
    from tasks.release.served_scoring import ServedScorer

    filler = load_tokenizer(source.config_dir / TOKENIZER_FILE).token_to_id(FILLER)
    assert filler is not None, f"a byte-level tokenizer has a token {FILLER!r}"
    resources = ServingResources(
        host=LOOPBACK[0],
        port=0,
        context_length=2 * len(token_ids_T),
        num_threads=1,
        startup_timeout_seconds=STARTUP_TIMEOUT_SECONDS,
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        running_model_server(gguf_path, resources, Path(directory) / "server.log") as server,
        ServedScorer(server.url, filler, source.recipe.vocab_size) as scorer,
    ):
        served = scorer.score(token_ids_T.tolist())
    ours = logits_TV[:-1].log_softmax(-1).gather(1, token_ids_T[1:, None])[:, 0].tolist()
    return max(abs(first - second) for first, second in zip(ours, served, strict=True))
