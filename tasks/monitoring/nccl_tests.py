"""Saved outputs of nccl-tests' all_reduce_perf, as samples: what was measured, and nothing where nothing was."""

from __future__ import annotations

import re
from pathlib import Path

from tasks.monitoring.metric_table import Figures

LINE = re.compile(
    r"^(?:\[[^\]]*\d,\d+\]<stdout>:|\s*\d+:)?"
    r"\s*(?P<size>\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+(?P<time>[\d.]+)\s+(?P<algbw>[\d.]+)\s+(?P<busbw>[\d.]+)\s",
    re.M,
)
"""The rank that `mpirun --tag-output` or `srun --label` puts first, then size count type redop root, time in
microseconds, algbw and busbw in GB/s, out of place."""
MICROSECONDS_PER_MS = 1000.0


def add_nccl_tests(figures: Figures, directory: Path) -> None:
    """The largest message of each output `NAME.txt` in the directory."""
    for path in sorted(directory.glob("*.txt")):
        lines = list(LINE.finditer(path.read_text(errors="replace")))
        if not lines:
            figures.unreadable(path)
            continue
        largest = max(lines, key=lambda line: int(line["size"]))
        labels = (path.stem, largest["size"])
        figures.add("nccl_allreduce_time_ms", float(largest["time"]) / MICROSECONDS_PER_MS, *labels)
        figures.add("nccl_bandwidth_gbps", float(largest["algbw"]), *labels)
        figures.add("nccl_busbw_gbps", float(largest["busbw"]), *labels)
