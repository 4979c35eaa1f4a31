"""The device that a process computes on."""

from __future__ import annotations

import os

import torch


def open_device(name: str) -> torch.device:
    """`cpu`, or for `cuda` the GPU of this rank's number on its node (LOCAL_RANK; 0 without one), made the current one:
    call it before anything allocates. Raises ValueError where there is no such GPU."""
    if name == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    refuse_missing_gpu(local_rank)
    # Matrix products have equal bits only with workspaces of a fixed size; read when the first one is computed.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def refuse_missing_gpu(local_rank: int = 0) -> None:
    """Raises ValueError where this machine has no GPU of that number."""
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        found = f"{num_devices} of {local_rank + 1} CUDA devices" if num_devices else "no CUDA device"
        raise ValueError(f"{found} on {os.uname().nodename}: set device to cpu, or launcher to one that gives GPUs")
