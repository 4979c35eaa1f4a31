"""Writes metrics.jsonl and rollouts.jsonl of a running job, on rank 0."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import torch

from configs.files.atomic_files import replacing


class StepLog:
    """Appends JSON lines that name their step; lines after `last_step`, from a run that was killed after its
    checkpoint, are dropped."""

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        kept = [line for line in _complete_lines(self.path) if json.loads(line)["step"] <= last_step]
        with replacing(self.path) as temporary:  # another inode: whoever tails the old one sees that it must start over
            temporary.write_text("".join(kept))

    def append(self, lines: list[dict[str, object]]) -> None:
        with open(self.path, "a") as file:
            file.writelines(json.dumps(values, allow_nan=False) + "\n" for values in lines)


def device_name(device: str) -> str:
    """What a rank computes on: cpu, or what the driver calls its accelerator."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def peak_memory_bytes() -> int:
    """The most memory this process has held: the accelerator's where there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _complete_lines(path: Path) -> list[str]:
    """Lines that end with a newline: a process that was killed may have left half of one."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
