"""Step: writes a checkpoint in one quantized format that vLLM, SGLang and transformers read.

In: hf/ of the checkpoint and, for formats of 4 bits, packed training rows to calibrate with. Out: hf/, with tokenizer
and chat template. Every tensor of the checkpoint is accounted for (model/formats/quantized_checkpoint.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Progress, Record, step
from tasks.evaluation.engine import reproducible_arithmetic
from tasks.release.calibration_rows import calibration_rows

if TYPE_CHECKING:
    from configs.schema import JobResources, QuantizationRecipe
    from tasks.data.packing.pack_phase import PackedPhase
    from tasks.data.shards.shard_chats import ChatShards
    from tasks.data.shards.shard_documents import TokenShards
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

NUM_THREADS = 1
"""Number of threads that search scales; on a CPU it changes the last bits, and so what is rounded up."""


class QuantizedCheckpoint(Record):
    """What became of the checkpoint's tensors."""

    checkpoint_digest: str
    quantized_format: str
    num_bytes: int
    """Of the weights; `num_original_bytes` before."""
    num_original_bytes: int
    num_quantized: int
    """Matrices; of these `num_expert_matrices` belong to routed experts."""
    num_expert_matrices: int
    num_kept: int
    """Tensors that are bit for bit the checkpoint's."""
    num_rescaled: int
    """Norms that AWQ divided by what it multiplied the following matrices with."""
    num_calibration_tokens: int
    """Tokens that every routed expert saw; 0 where the format needs none."""
    least_routed_tokens: int
    """Of these, tokens that the router itself sent to the expert that it chose least, of all layers."""
    num_experts: int
    """Routed experts of all layers; 0 where the format needs no tokens."""
    idle_experts: tuple[str, ...]
    """Those that the router chose for none of the tokens, by name."""


@step(
    content=("hf/*",),
    distributions=("torch", "transformers", "llmcompressor", "compressed-tensors", "safetensors", "numpy"),
)
def quantize_checkpoint(
    *,
    checkpoint: Artifact[TrainedCheckpoint],
    packed: Artifact[PackedPhase] | None,
    shards: Artifact[TokenShards] | None,
    chats: Artifact[ChatShards] | None,
    recipe: QuantizationRecipe,
    resources: JobResources,
    output: Output,
) -> QuantizedCheckpoint:
    """`packed` is None for formats that need no text, as are `shards` and `chats`, which hold its tokens. Raises
    ValueError where a tensor is lost."""
    from model.formats.quantized_checkpoint import write_quantized

    output.report(Progress(0, 0, "matrices", f"quantizing to {recipe.quantized_format}"))
    rows = [] if packed is None else calibration_rows(packed, (shards, chats), recipe.calibration_rows)
    source, target = checkpoint.directory("hf"), output.path("hf/config.json").parent
    with reproducible_arithmetic(NUM_THREADS):
        tensors = write_quantized(source, target, recipe.quantized_format, rows)
    sizes = [sum(path.stat().st_size for path in each.glob("*.safetensors")) for each in (target, source)]
    counted = {name: value for name, value in vars(tensors).items() if name != "coverage"}
    return QuantizedCheckpoint(
        checkpoint_digest=checkpoint.digest,
        quantized_format=recipe.quantized_format,
        num_bytes=sizes[0],
        num_original_bytes=sizes[1],
        **counted,
        **vars(tensors.coverage),
    )
