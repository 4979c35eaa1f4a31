"""Step: writes a checkpoint as GGUF files that llama.cpp serves: model-F32.gguf, model-Q8_0.gguf, model-Q4_K_M.gguf.

In: hf/ with tokenizer.json, and the importance matrix where a type is calibrated. Every file is read back, and every
tensor of it compared with the checkpoint's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Progress, Record, step

if TYPE_CHECKING:
    from configs.schema import ConversionRecipe, GgufType
    from tasks.release.measure_importance import ImportanceMatrix
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

MODEL_NAME = "glm46"
"""`general.name` of the files; a constant, so that equal weights give equal bytes at every scale."""


class GgufFiles(Record):
    """The files, by GGUF type."""

    checkpoint_digest: str
    file_names: dict[str, str]
    num_bytes: dict[str, int]
    tensor_types: dict[str, dict[str, int]]
    """Tensors of each file by their type: all of the checkpoint's."""
    largest_rounding: dict[str, float]
    """Of the tensor that lost most, over its size (tasks/release/gguf_comparison.py)."""
    num_calibration_tokens: int
    """Tokens that every routed expert saw; 0 where no type is calibrated."""


@step(content=("model-*.gguf",), distributions=("gguf", "numpy", "safetensors", "xllamacpp"))
def convert_to_gguf(
    *,
    checkpoint: Artifact[TrainedCheckpoint],
    recipe: ConversionRecipe,
    output: Output,
    importance: Artifact[ImportanceMatrix] | None = None,
) -> GgufFiles:
    """One file per type of `recipe.gguf_types`. Raises ValueError for a calibrated type without `importance`, and
    RuntimeError where a file does not hold what the checkpoint does."""
    from safetensors.numpy import load_file

    from model.formats.gguf_checkpoint import write_gguf
    from tasks.release.checkpoint_source import open_source
    from tasks.release.gguf_comparison import compare_gguf
    from tasks.release.measure_importance import IMPORTANCE_FILE

    checkpoint_dir = checkpoint.directory("hf")
    weights = None if importance is None else load_file(importance.path(IMPORTANCE_FILE))
    names: dict[GgufType, str] = {gguf_type: f"model-{gguf_type}.gguf" for gguf_type in recipe.gguf_types}
    found = {}
    for number, (gguf_type, file_name) in enumerate(names.items()):
        output.report(Progress(number, len(names), "files", file_name))
        write_gguf(
            checkpoint_dir,
            checkpoint_dir / "tokenizer.json",
            output.path(file_name),
            gguf_type=gguf_type,
            name=MODEL_NAME,
            importance=weights,
        )
        found[gguf_type] = compare_gguf(output.path(file_name), open_source(checkpoint_dir))
    return GgufFiles(
        checkpoint_digest=checkpoint.digest,
        file_names={gguf_type: name for gguf_type, name in names.items()},
        num_bytes={gguf_type: output.path(name).stat().st_size for gguf_type, name in names.items()},
        tensor_types={gguf_type: tensors.types for gguf_type, tensors in found.items()},
        largest_rounding={gguf_type: round(tensors.largest_rounding, 6) for gguf_type, tensors in found.items()},
        num_calibration_tokens=0 if importance is None else importance.record.num_tokens,
    )
