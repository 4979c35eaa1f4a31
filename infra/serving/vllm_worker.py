"""Added to a worker of vLLM (`--worker-extension-cls infra.serving.vllm_worker.WeightReader`), whose process imports
this file in vLLM's environment: it reads weights in place, on processors too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class WeightReader:
    """What `/collective_rpc` can call besides vLLM's own methods."""

    if TYPE_CHECKING:
        model_runner: Any

        def reload_weights(self, *, weights_path: str) -> None: ...

    def read_weights(self, weights_path: str) -> None:
        """Replace the weights by those of a Hugging Face directory of the same architecture.

        vLLM 0.32 packs experts for CPUs only when it builds their kernel, and keeps the kernel while it reloads: then
        they are read as if they were packed, and compute something else. Without a kernel it builds and packs anew.
        """
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        if current_platform.is_cpu():
            for module in self.model_runner.get_model().modules():
                method: Any = getattr(module, "quant_method", None)
                if hasattr(method, "moe_kernel"):
                    method.moe_kernel = None
        self.reload_weights(weights_path=weights_path)
