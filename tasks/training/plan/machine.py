"""What a rank of a cluster can do, for plans: rates from data sheets and papers, shares of them that were measured on
one H200 (docs/scale.md, Measured) or are assumed.

`peak_flops_per_second` and memory are settings of a phase.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Bytes per second are per rank and direction."""

    name: str
    node_bytes_per_second: float
    """Between the ranks of a node."""
    network_bytes_per_second: float
    """Between nodes."""
    memory_bytes_per_second: float


H100 = Machine("H100", 450e9, 50e9, 3.35e12)
"""NVIDIA's data sheet of the SXM5: NVLink 900 GB/s in both directions together, 3.35 TB/s; one 400 Gb/s port of
InfiniBand per GPU."""
H800 = Machine("H800", 160e9, 50e9, 3.35e12)
"""NVLink and InfiniBand as the DeepSeek-V3 report has them (arXiv 2412.19437, section 3.2.2: 160 GB/s, 50 GB/s)."""
MACHINES = {machine.name.lower(): machine for machine in (H100, H800)}

MATRIX_SHARE = 0.7
"""Of peak, of matrix products but attention's: 0.69 was measured."""
ATTENTION_SHARE = 0.19
"""Of peak, of attention's FLOPs as training_flops_per_token counts them: measured, with torch's FlashAttention 2, which
computes the scores again, and deterministic algorithms. FlashAttention 3 reaches 0.75 of peak (arXiv 2407.08608)."""
FREE_ATTENTION_SHARE = 0.386
"""The same without deterministic algorithms, with cuDNN's kernel: measured."""
MEMORY_SHARE = 0.5
"""Of the memory's rate, of what is read and written beside products: 0.46 was measured in passes whose layers are not
compiled, 0.63 in Muon's update."""
LINK_SHARE = 0.8
"""Assumed: of a link's rate, in collectives of many megabytes."""
MEMORY_USED = 0.9
"""A topology is chosen only if the plan's memory is at most this share of a rank's: the rest is for padding,
fragmentation and experts that are used unevenly."""
HOURS_TO_FAILURE = 50_700.0
"""Mean hours of one GPU between interruptions of its job: Llama 3's 419 unexpected ones in 54 days on 16,384 GPUs
(arXiv 2407.21783, section 3.3.4)."""
RESTART_SECONDS = 600.0
"""From a failure to the next step, assumed: MegaScale finds the cause within 10 minutes (arXiv 2402.15627)."""
HOST_COPY_BYTES_PER_SECOND = 5e9
"""Of one rank's copy of its part of a checkpoint to host memory, while training waits; assumed, for memory that is not
pinned."""
