"""Computes by formula the bytes of DeepSpeed's buckets on a rank, while activations live.

Gradients are reduced and weights are gathered in buckets. A test compares the formula with what DeepSpeed allocates
(0.19.8: stage_1_and_2.py, setup_buckets; stage3.py; engine.py, allreduce_no_retain).
"""

from __future__ import annotations

from configs.schema import TrainingResources

LIVE_ELEMENTS = 3_000_000_000
"""ZeRO 3 gathers at most this many elements ahead, and keeps those that are used again within as many (S2)."""

FLOAT32_BYTES = 4


def bucket_bytes(resources: TrainingResources, num_elements: int, element: int) -> int:
    """Bytes on a rank whose stage has `num_elements` elements before ZeRO divides them. Stages 1 and 2 reduce in two
    buffers in turn, of the gradients' dtype; a bfloat16 one is sent as a float32 copy. Stage 1 in bfloat16 reduces its
    flat gradients as they are. Stage 3 reduces in one buffer, and keeps weights gathered up to a number of elements.
    Without ZeRO there is no buffer: gradients are flattened when the passes are over."""
    bucket = resources.bucket_elements
    if resources.zero_stage == 0 or (resources.zero_stage == 1 and element < FLOAT32_BYTES):
        return 0
    if resources.zero_stage == 3:
        return FLOAT32_BYTES * bucket + element * min(num_elements, LIVE_ELEMENTS)
    return 2 * element * bucket + (FLOAT32_BYTES * bucket if element < FLOAT32_BYTES else 0)
