"""Generates DeepSpeed's JSON from the phase configuration."""

from __future__ import annotations

from typing import Any, Literal

from configs.schema import TrainingResources
from tasks.training.plan.bucket_memory import LIVE_ELEMENTS
from tasks.training.plan.topology import data_parallel

LEAF_MODULES = [
    "model.architecture.attention.Attention",
    "model.architecture.gated_mlp.GatedMlp",
    "model.architecture.gated_mlp.SeparateMlp",
    "model.architecture.moe.MixtureOfExperts",
]
"""ZeRO 3 gathers each of these as a whole: they read the weights of the modules inside them without calling those."""
RECOMPUTED_LEAF_MODULES = ["model.architecture.decoder_layer.DecoderLayer", "model.architecture.mtp.MtpLayer"]
"""Where whole layers are computed again in the backward pass: their weights must stay gathered after the second forward
pass."""
PERSISTENT_ELEMENTS = 100_000
"""ZeRO 3 keeps smaller parameters (norms, biases) whole on every rank (DeepSpeed's default; S2's 1e6 would keep every
router too)."""
AIO = {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
"""Of reads and writes to NVMe (S2)."""


def deepspeed_config(resources: TrainingResources, dtype: Literal["float32", "bfloat16"]) -> dict[str, Any]:
    """The optimizer is a client object. Accumulation is ours (a step's batch follows the course), so DeepSpeed counts
    one micro-batch per step, and the engine says which backward pass is the last. Without ZeRO bfloat16 is ours too
    (mixed_precision.py).
    """
    is_bfloat16 = dtype == "bfloat16" and resources.zero_stage > 0
    return {
        # Of the ranks over which DeepSpeed averages: those with positions of their own.
        "train_batch_size": resources.micro_batch_sequences * data_parallel(resources) * resources.context_parallel,
        "train_micro_batch_size_per_gpu": resources.micro_batch_sequences,
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": False},
        # Stage 1 sums gradients as they come by our own hook (gradients.py), which makes no float32 copy of each.
        "bf16": {"enabled": is_bfloat16, "immediate_grad_update": False},
        # Gradients of bfloat16 weights are summed in float32, over micro-batches and over ranks.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        # Left out it means 1.0. Gradients are clipped before the optimizer, by optimizer.max_grad_norm
        # (tasks/training/parallel/gradients.py).
        "gradient_clipping": 0.0,
        "zero_optimization": _zero(resources),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "aio": AIO,
        "steps_per_print": None,
    }


def _zero(resources: TrainingResources) -> dict[str, Any]:
    offloaded = {"nvme_path": resources.node_dir, "pin_memory": True, "buffer_count": 4}
    return {
        "stage": resources.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": resources.bucket_elements,
        "allgather_bucket_size": resources.bucket_elements,
        "stage3_prefetch_bucket_size": resources.bucket_elements,
        "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
        "stage3_max_live_parameters": LIVE_ELEMENTS,
        "stage3_max_reuse_distance": LIVE_ELEMENTS,
        # Weights are saved by tasks/training/state/state.py, which never holds the whole model.
        "stage3_gather_16bit_weights_on_model_save": False,
        "leaf_module": {"classes": RECOMPUTED_LEAF_MODULES if resources.recompute == "full" else LEAF_MODULES},
        "offload_optimizer": {"device": resources.offload_optimizer, **offloaded, "fast_init": False},
        "offload_param": {"device": resources.offload_parameters, **offloaded},
    }
