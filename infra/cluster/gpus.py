"""The GPUs of this node by nvidia-smi, and the versions of CUDA and NCCL that PyTorch has."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

COLUMNS = ("index", "name", "driver_version", "memory.total", "clocks.current.sm", "clocks.max.sm")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Drivers before 535 have the second name only."""
SLOW_CLOCKS = {
    0x02: "application clocks below the maximum",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of NVML's reasons that an idle or busy GPU in order never has; 0x01 is idle, 0x04 its power limit under load."""
ROW = re.compile(r"\s*\d+,[^,]+,\s*\d+(\.\d+)*\s*(,[^,]+){4}")
"""Index, name and driver of COLUMNS are always there."""
LOST = re.compile(r"\[(Unknown Error|GPU [^]]*)\]")
"""nvidia-smi ends with exit code 0 all the same; [N/A] is a column that the GPU does not have."""
SECONDS = 60


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    driver: str
    memory_mib: int
    clock_mhz: int
    max_clock_mhz: int
    slow_reasons: tuple[str, ...]
    """Why its clocks are held down."""


def query_gpus() -> list[Gpu]:
    """Empty where nvidia-smi is missing. Raises RuntimeError with its words where it fails or does not answer, and
    ValueError for a GPU that it cannot read."""
    if shutil.which("nvidia-smi") is None:
        return []
    answer = _ask(REASONS[0])
    if answer.returncode:
        answer = _ask(REASONS[1])
    if answer.returncode:
        lines = [line.strip() for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
        words = [line for line in lines if not re.match(r"\d+,", line)]  # rows of the GPUs in order come first
        raise RuntimeError(f"nvidia-smi: {'; '.join(words) or f'exit code {answer.returncode}'}")
    return [parse_gpu(line) for line in answer.stdout.splitlines() if line.strip()]


def parse_gpu(line: str) -> Gpu:
    """A line of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; a clock that it does not know is 0. Raises
    ValueError with the line of a GPU that is lost."""
    if not ROW.fullmatch(line) or LOST.search(line):
        raise ValueError(f"nvidia-smi cannot read a GPU: {line.strip()}")
    index, name, driver, memory, clock, max_clock, mask = (field.strip() for field in line.split(","))
    bits = int(mask, 16) if mask.startswith("0x") else 0
    slow = tuple(text for bit, text in SLOW_CLOCKS.items() if bits & bit)
    memory_mib, clock_mhz, max_mhz = (int(text) if text.isdecimal() else 0 for text in (memory, clock, max_clock))
    return Gpu(int(index), name, driver, memory_mib, clock_mhz, max_mhz, slow)


def torch_versions() -> tuple[str, str]:
    """CUDA and NCCL of PyTorch; empty in a build without them."""
    import torch

    if torch.version.cuda is None:
        return "", ""
    from torch.cuda import nccl

    return torch.version.cuda, ".".join(map(str, nccl.version()))


def _ask(reasons: str) -> subprocess.CompletedProcess[str]:
    columns = ",".join([*COLUMNS, reasons])
    command = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nvidia-smi did not answer in {SECONDS} s: look for Xid in `dmesg`") from None
