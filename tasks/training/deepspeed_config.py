"""DeepSpeed's JSON, generated from the phase configuration."""

from __future__ import annotations

from typing import Any

from configs.schema import TrainingResources


def deepspeed_config(resources: TrainingResources) -> dict[str, Any]:
    """The optimizer is a client object. Accumulation is ours (a step's batch follows the course), so DeepSpeed counts one micro-batch per
    step and is told which backward pass is the last. Precision is ours too (mixed_precision.py): to DeepSpeed everything is float32.
    """
    return {
        "train_batch_size": resources.micro_batch_sequences * resources.num_ranks,
        "train_micro_batch_size_per_gpu": resources.micro_batch_sequences,
        "gradient_accumulation_steps": 1,
        # Leaving it out means 1.0, which would cut every orthogonalised update; Newton-Schulz does not see the gradient's scale.
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": resources.zero_stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
