"""A rank's device with a faked CUDA: which GPU it takes, and that it takes it before anything allocates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from model.device import open_device
from model.formats import hf_checkpoint
from tasks.evaluation.engine import load_engine
from tasks.training.loop.rank_process import configure_process


class Recorded(TorchDispatchMode):
    """Notes every operation on tensors as `tensor`."""

    def __init__(self, events: list[object]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.events.append("tensor")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def events(monkeypatch):
    """What happened on a node with four GPUs, in order."""
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: seen.append(number))
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with Recorded(seen):
        yield seen


def test_a_rank_takes_the_gpu_of_its_number_on_the_node(events, monkeypatch):
    assert open_device("cuda") == torch.device("cuda", 2) and events == [2]
    monkeypatch.delenv("LOCAL_RANK")
    assert open_device("cuda") == torch.device("cuda", 0) and events == [2, 0]
    assert open_device("cpu") == torch.device("cpu") and events == [2, 0]
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(ValueError, match=r"4 of 5 CUDA devices on .*: set device to cpu"):
        open_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"no CUDA device on .*: set device to cpu, or launcher"):
        open_device("cuda")


def test_a_training_rank_takes_its_gpu_before_anything_allocates_and_keeps_the_cpus_threads(events, monkeypatch):
    import deepspeed

    monkeypatch.setitem(sys.modules, "mlflow", None)  # as the rank does; it comes back
    monkeypatch.setenv("RANK", "6")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("GLM46_RENDEZVOUS", "nowhere")
    monkeypatch.setattr(dist, "FileStore", lambda path, size: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **values: events.append(values["rank"]))
    monkeypatch.setattr(deepspeed, "init_distributed", lambda: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: pytest.fail("a setting of CPUs"))
    configure_process("cuda", num_threads=1)
    assert events == [2, 6]


def test_an_engine_takes_its_gpu_before_anything_allocates(events, monkeypatch, tmp_path):
    def load_model(checkpoint_dir: Path, *, device: torch.device, dtype: torch.dtype):
        events.append((device, dtype))
        return torch.nn.Linear(1, 1)

    monkeypatch.setattr(hf_checkpoint, "load_model", load_model)
    load_engine(tmp_path, weights_version="v", batch_sequences=1, device="cuda", dtype="bfloat16")
    assert events[:2] == [2, (torch.device("cuda", 2), torch.bfloat16)]
