"""DeepSpeed's JSON: every setting of the infrastructure guide's stage-3 file has a key, or a stated reason why it has
none."""

import json

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from configs.load import load_scale
from tasks.training.parallel.deepspeed_config import deepspeed_config

GUIDE = json.loads("""
{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
 "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
 "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": "auto", "warmup_num_steps": "auto",
  "total_num_steps": "auto"}},
 "fp16": {"enabled": false}, "bf16": {"enabled": true},
 "zero_optimization": {"stage": 3, "contiguous_gradients": true, "overlap_comm": true, "reduce_scatter": true,
  "reduce_bucket_size": 500000000, "allgather_bucket_size": 500000000, "stage3_prefetch_bucket_size": 500000000,
  "stage3_param_persistence_threshold": 1000000, "stage3_max_live_parameters": 3000000000, "stage3_max_reuse_distance": 3000000000,
  "stage3_gather_16bit_weights_on_model_save": true,
  "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 4, "fast_init": false},
  "offload_param": {"device": "none"}},
 "gradient_clipping": 1.0,
 "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": false, "contiguous_memory_optimization": true,
  "synchronize_checkpoint_boundary": true},
 "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": false, "overlap_events": true},
 "steps_per_print": 10, "tensorboard": {"enabled": true, "output_path": "logs/tensorboard", "job_name": "glm46_training"}}
""")  # noqa: E501
"""deepspeed_stage3.json of the infrastructure guide (S2)."""
RESOURCES = load_scale("micro").phases[0].resources


def missing_keys(wanted: dict, present: dict, prefix: str = "") -> list[str]:
    missing = []
    for key, value in wanted.items():
        if key not in present:
            missing.append(prefix + key)
        elif isinstance(value, dict):
            missing += missing_keys(value, present[key], f"{prefix}{key}.")
    return missing


NOT_GENERATED = {
    "optimizer": "a client object, model/optimizer/optimizer.py: DeepSpeed's Muon scales updates otherwise and names "
    "parameters by pattern",
    "scheduler": "learning rates follow the tokens of the course, over phases and batch sizes: "
    "tasks/training/schedule/schedules.py",
    "activation_checkpointing": "DeepSpeed's own recomputation is not called: tasks/training/parallel/recompute.py "
    "takes torch's",
    "tensorboard": "the worker writes event files itself, with the losses that DeepSpeed does not know: "
    "tasks/training/watch/trackers.py",
}
"""Sections of the infrastructure guide's deepspeed_stage3.json (S2) that have no key here, and why."""


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_setting_of_the_guides_file_has_a_key_or_a_reason(zero_stage):
    config = deepspeed_config(RESOURCES.model_copy(update={"zero_stage": zero_stage}), "bfloat16")
    assert sorted(missing_keys(GUIDE, config)) == sorted(NOT_GENERATED)


def test_resources_reach_the_json_and_deepspeed_takes_it():
    changes = {
        "zero_stage": 3,
        "offload_optimizer": "nvme",
        "offload_parameters": "cpu",
        "node_dir": "/local_nvme",
        "bucket_elements": 1234,
    }
    config = deepspeed_config(RESOURCES.model_copy(update=changes), "bfloat16")
    parsed = DeepSpeedConfig(config).zero_config
    assert (parsed.stage, parsed.reduce_bucket_size, parsed.prefetch_bucket_size) == (3, 1234, 1234)
    assert (parsed.offload_optimizer.device, str(parsed.offload_optimizer.nvme_path)) == ("nvme", "/local_nvme")
    assert parsed.offload_param.device == "cpu"


def test_clipping_is_written_down_as_zero():
    # Left out it is 1.0.
    config = deepspeed_config(RESOURCES, "float32")
    assert DeepSpeedConfig(config).gradient_clipping == 0.0
    assert (
        DeepSpeedConfig({key: value for key, value in config.items() if key != "gradient_clipping"}).gradient_clipping
        == 1.0
    )
