"""The process of a rank: its threads, kernels and process group, and the signal at which it saves and ends."""

from __future__ import annotations

import logging
import os
import signal
import sys

import torch
import torch.distributed as dist

from configs.schema import Device
from model.device import open_device


class Interruption:
    """Whether this process was asked to save and leave."""

    def __init__(self) -> None:
        self.is_asked = False
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(self, "is_asked", True))

    def on_any_rank(self, device: torch.device) -> bool:
        """A signal reaches ranks at different steps: all of them leave together."""
        if dist.get_world_size() > 1:
            flag = torch.tensor(int(self.is_asked), device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self.is_asked = bool(flag)
        return self.is_asked


def configure_process(device: Device, num_threads: int, is_deterministic: bool = True) -> None:
    """The rank's device, fixed threads of a CPU, kernels that add in one order, process group, quiet libraries."""
    if open_device(device).type == "cpu":
        torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(is_deterministic)
    # With NaN, as deterministic algorithms would: it costs time, and nothing here reads such memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    # DeepSpeed's autotuner imports it where it is installed: two seconds, and nothing here may talk to a tracker.
    sys.modules["mlflow"] = None  # pyright: ignore[reportArgumentType]
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Ranks of one machine meet in a file: torch's store over TCP listens on every interface and asks for no password.
    store = dist.FileStore(os.environ["GLM46_RENDEZVOUS"], world_size)  # pyright: ignore[reportPrivateImportUsage]
    backend = get_accelerator().communication_backend_name()  # pyright: ignore[reportOptionalMemberAccess]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    deepspeed.init_distributed()
