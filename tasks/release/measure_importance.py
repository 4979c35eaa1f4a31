"""Step: measures the importance matrix of a checkpoint, by which llama.cpp's quantizer weighs its rounding.

In: hf/ of the checkpoint, packed training rows. Out: importance.safetensors: per matrix of a layer, by its name in a
GGUF file, the mean square of what each column is multiplied with; and `routed_tokens`, how many tokens the router sent
to each expert of each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Progress, Record, step
from tasks.evaluation.engine import reproducible_arithmetic
from tasks.release.calibration_rows import calibration_rows

if TYPE_CHECKING:
    from configs.schema import CalibrationRecipe, JobResources
    from tasks.data.packing.pack_phase import PackedPhase
    from tasks.data.shards.shard_chats import ChatShards
    from tasks.data.shards.shard_documents import TokenShards
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

IMPORTANCE_FILE = "importance.safetensors"
ROUTED = "routed_tokens"
NUM_THREADS = 1
"""Number of threads; on a CPU it changes the last bits, and so what is rounded up."""


class ImportanceMatrix(Record):
    """What was measured."""

    checkpoint_digest: str
    num_matrices: int
    num_tokens: int
    """Tokens by which every matrix was measured, those of every routed expert included."""
    least_routed_tokens: int
    """Tokens that the router itself sent to the expert that it chose least, of all layers; 0 without experts."""
    num_experts: int
    """Routed experts of all layers."""
    idle_experts: tuple[str, ...]
    """Those that the router chose for none of the tokens, by name: they were measured nevertheless."""


@step(content=(IMPORTANCE_FILE,), distributions=("torch", "safetensors", "numpy"))
def measure_importance(
    *,
    checkpoint: Artifact[TrainedCheckpoint],
    packed: Artifact[PackedPhase],
    shards: Artifact[TokenShards] | None,
    chats: Artifact[ChatShards] | None,
    recipe: CalibrationRecipe,
    resources: JobResources,
    output: Output,
) -> ImportanceMatrix:
    """Raises ValueError where a matrix cannot be calibrated."""
    from safetensors.torch import save_file

    from model.device import open_device
    from model.formats import gguf_importance
    from model.formats.hf_checkpoint import load_model

    rows = calibration_rows(packed, (shards, chats), recipe.calibration_rows)
    output.report(Progress(0, len(rows), "rows", "measuring what every matrix is multiplied with"))
    with reproducible_arithmetic(NUM_THREADS):
        model = load_model(checkpoint.directory("hf"), device=open_device(resources.device))
        importance = gguf_importance.measure_importance(model, rows)
    save_file(importance.columns | {ROUTED: importance.routed_LE}, output.path(IMPORTANCE_FILE))
    return ImportanceMatrix(
        checkpoint_digest=checkpoint.digest,
        num_matrices=len(importance.columns),
        num_tokens=importance.num_tokens,
        **vars(importance.coverage),
    )
