"""Imported in vLLM's environment (`--worker-extension-cls`), so that its build for CPUs computes a mixture of experts
beside adapters: vLLM 0.32 gives it Triton's kernels there, of which the build has none."""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig  # pyright: ignore[reportMissingImports]

check = FusedMoEConfig.__post_init__


def check_without_adapters(config) -> None:
    """The experts themselves have no adapter (`--lora-target-modules`)."""
    config.is_lora_enabled = False
    check(config)


FusedMoEConfig.__post_init__ = check_without_adapters


class PlainExperts:
    """Nothing that a worker could be asked for."""
