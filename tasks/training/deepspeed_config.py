"""DeepSpeed's JSON, generated from the phase configuration."""

from __future__ import annotations

from typing import Any

from configs.schema import TrainingRecipe, TrainingResources


def deepspeed_config(recipe: TrainingRecipe, resources: TrainingResources) -> dict[str, Any]:
    """The optimizer is a client object. Accumulation is ours (a step's batch follows the course), so DeepSpeed counts one micro-batch per
    step and is told which backward pass is the last.
    """
    return {
        "train_batch_size": resources.micro_batch_sequences * resources.num_ranks,
        "train_micro_batch_size_per_gpu": resources.micro_batch_sequences,
        "gradient_accumulation_steps": 1,
        # Leaving it out means 1.0, which would cut every orthogonalised update; Newton-Schulz does not see the gradient's scale.
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": resources.zero_stage},
        "zero_allow_untested_optimizer": True,
        # Parameters stay float32 and are their own masters; matrix products run in bfloat16, the router in float32.
        "torch_autocast": {"enabled": recipe.dtype == "bfloat16", "dtype": "bfloat16"},
        "steps_per_print": None,
    }
