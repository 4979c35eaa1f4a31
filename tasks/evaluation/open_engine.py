"""Opens who computes a checkpoint: an engine of this process, with the whole model on one device, or a server that
reads the checkpoint's files under the same path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tasks.evaluation.engine import load_engine

if TYPE_CHECKING:
    from configs.schema import EvaluationResources
    from infra.step import Artifact
    from model.generation.generation import InProcessEngine
    from tasks.training.policy.served_engine import ServedEngine
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint


def open_engine(
    checkpoint: Artifact[TrainedCheckpoint],
    rollouts: Literal["in_process", "sglang", "vllm"],
    dtype: Literal["float32", "bfloat16"],
    resources: EvaluationResources,
) -> InProcessEngine | ServedEngine:
    """Callers ask for the engine's own `weights_version`. A server computes in its own dtype."""
    weights_dir = checkpoint.directory("hf")
    if rollouts != "in_process":
        from tasks.training.policy.served_engine import ServedEngine

        version = f"{checkpoint.record.phase}-{checkpoint.digest[:12]}"
        return ServedEngine(rollouts, resources.rollout_server, weights_dir, version)
    return load_engine(
        weights_dir,
        weights_version=checkpoint.digest,
        batch_sequences=resources.batch_sequences,
        device=resources.device,
        dtype=dtype,
    )
