"""Plans what serves a model's official weights: the fewest nodes of eight GPUs, in each format that is published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from configs.schema import Scale
from tasks.serving.fleet import fleet_of
from tasks.serving.plan_serving import BFLOAT16, plan_serving
from tasks.serving.planned_server import ServingPlan, Wishes
from tasks.serving.served_model import model_of_scale

PUBLISHED = (BFLOAT16, "FP8_BLOCK")
"""GLM-4.5, Air and GLM-4.6 are published in both."""
GPUS_PER_NODE, MOST_NODES = 8, 16


def official_servers(scale: Scale, gpu: str) -> Iterator[ServingPlan]:
    """By vLLM, for one request of the whole context, on GPUs of GPU_GB; none of a format that MOST_NODES do not
    hold."""
    for stored in PUBLISHED:
        model = replace(model_of_scale(scale), stored_format=stored)
        for num_nodes in range(1, MOST_NODES + 1):
            try:
                yield plan_serving(model, fleet_of(gpu, GPUS_PER_NODE, num_nodes), Wishes("vllm", "balanced"))
                break
            except ValueError:
                continue
