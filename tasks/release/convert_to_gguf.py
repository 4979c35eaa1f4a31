"""Step: writes a checkpoint as GGUF files that llama.cpp serves: model-F32.gguf, model-Q8_0.gguf.

In: hf/ with tokenizer.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Progress, Record, step

if TYPE_CHECKING:
    from configs.schema import ReleaseRecipe
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

MODEL_NAME = "glm46"
"""`general.name` of the files; a constant, so that equal weights give equal bytes at every scale."""


class GgufFiles(Record):
    """The files, by GGUF type."""

    checkpoint_digest: str
    file_names: dict[str, str]
    num_bytes: dict[str, int]


@step(content=("model-*.gguf",), distributions=("gguf", "numpy", "safetensors"))
def convert_to_gguf(*, checkpoint: Artifact[TrainedCheckpoint], recipe: ReleaseRecipe, output: Output) -> GgufFiles:
    """One file per type of `recipe.gguf_types`."""
    from model.formats.gguf_checkpoint import write_gguf

    checkpoint_dir = checkpoint.directory("hf")
    file_names: dict[str, str] = {gguf_type: f"model-{gguf_type}.gguf" for gguf_type in recipe.gguf_types}
    for number, gguf_type in enumerate(recipe.gguf_types):
        file_name = file_names[gguf_type]
        output.report(Progress(number, len(file_names), "files", file_name))
        write_gguf(
            checkpoint_dir,
            checkpoint_dir / "tokenizer.json",
            output.path(file_name),
            gguf_type=gguf_type,
            name=MODEL_NAME,
        )
    return GgufFiles(
        checkpoint_digest=checkpoint.digest,
        file_names=file_names,
        num_bytes={gguf_type: output.path(file_name).stat().st_size for gguf_type, file_name in file_names.items()},
    )
