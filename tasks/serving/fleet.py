"""The machines that a model is served on: named as 8xH100, described by a YAML file, or those of this machine."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
from pydantic import Field, ValidationError

from configs.load import describe_problems
from configs.schema.base import Frozen
from configs.strict_yaml import read_yaml
from infra.cluster.gpus import query_gpus

GPU_GB = {"H100": 80.0, "H200": 141.0, "H200 NVL": 141.0, "H800": 80.0, "A100-40": 40.0, "A100-80": 80.0}
"""Memory of a GPU in 1e9 bytes, as NVIDIA's data sheets name it."""
NO_GPU = "none"
PRESET = re.compile(r"(?:(\d+)x)?(\d+)x(.+)")
EXAMPLES = "8xH100, 8xH200, 4xA100-80, 1xH100, 2x8xH100 (two nodes), none, or a YAML file"


class Fleet(Frozen):
    """Nodes of one kind, each with GPUs of one kind. The keys of a fleet file."""

    gpu: str
    """Name, for messages."""
    gpu_memory_gb: float = Field(ge=0)
    """Memory of one GPU in 1e9 bytes."""
    gpus_per_node: int = Field(ge=0)
    num_nodes: int = Field(gt=0)
    host_memory_gb: float = Field(ge=0)
    """Memory of one node's processors in 1e9 bytes, which llama.cpp uses; 0: not known."""

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_node * self.num_nodes

    def __str__(self) -> str:
        if not self.num_gpus:
            return f"no GPU, {self.host_memory_gb:.1f} GB of memory"
        nodes = f"{self.num_nodes} nodes of " if self.num_nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node} x {self.gpu} ({self.gpu_memory_gb:g} GB each)"


def find_fleet(name_or_path: str | None) -> Fleet:
    """A preset, the fleet of a YAML file (a name that ends in .yaml or .yml), or, where None, what this machine has.
    Raises ValueError."""
    if name_or_path is None:
        return _this_machine()
    if name_or_path.endswith((".yaml", ".yml")):
        return _read_fleet(Path(name_or_path))
    if name_or_path == NO_GPU:
        return _without_gpu()
    match = PRESET.fullmatch(name_or_path)
    if match is None or match[3] not in GPU_GB or not int(match[1] or 1) or not int(match[2]):
        raise ValueError(
            f"no hardware {name_or_path!r}: write {EXAMPLES}; the GPUs are {', '.join(GPU_GB)}, a file describes others"
        )
    return fleet_of(match[3], int(match[2]), int(match[1] or 1))


def fleet_of(gpu: str, gpus_per_node: int, num_nodes: int) -> Fleet:
    """A fleet of GPUs of GPU_GB."""
    return Fleet(gpu=gpu, gpu_memory_gb=GPU_GB[gpu], gpus_per_node=gpus_per_node, num_nodes=num_nodes, host_memory_gb=0)


def _this_machine() -> Fleet:
    gpus = query_gpus()
    if not gpus:
        return _without_gpu()
    smallest = min(gpu.memory_mib for gpu in gpus)
    return Fleet(
        gpu=gpus[0].name,
        gpu_memory_gb=smallest * 2**20 / 1e9,
        gpus_per_node=len(gpus),
        num_nodes=1,
        host_memory_gb=_host_memory_gb(),
    )


def _without_gpu() -> Fleet:
    return Fleet(gpu=NO_GPU, gpu_memory_gb=0, gpus_per_node=0, num_nodes=1, host_memory_gb=_host_memory_gb())


def _host_memory_gb() -> float:
    return psutil.virtual_memory().total / 1e9


def _read_fleet(path: Path) -> Fleet:
    if not path.is_file():
        raise ValueError(f"no file {path.absolute()}: name a fleet file that exists, or {EXAMPLES}")
    try:
        return Fleet.model_validate(read_yaml(str(path), path.read_bytes()))
    except ValidationError as error:
        raise ValueError(f"{path}: {describe_problems(error)}") from error
