"""One record per benchmark: ours beside a peer, with what is needed to judge it. Printed as one JSON line, the
benchmark's last; with `--write` on the benchmark's command line also stored as benchmarks/results/NAME.json, beside
hardware, command and date.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS_DIR = Path(__file__).resolve().parent / "results"
WRITE_FLAG = "--write"
DISTRIBUTIONS = ("torch", "transformers", "deepspeed")
"""Whose versions decide a training or generation figure."""


def report(
    name: str, *, ours: float, peer: float | None, unit: str, lower_is_better: bool = False, **extra: object
) -> dict[str, object]:
    """Print the record as one JSON line and return it; with `--write` among the process's arguments store it as
    results/NAME.json.

    `ratio` is how many times better ours is: ours / peer, or peer / ours where less is better. A ratio in `extra`
    replaces it, for benchmarks that take the median of paired rounds. None means no peer: costs that are only our own.
    """
    compared = (
        {}
        if peer is None
        else {"peer": _rounded(peer), "ratio": round(peer / ours if lower_is_better else ours / peer, 3)}
    )
    record: dict[str, object] = {"ours": _rounded(ours), **compared, "unit": unit, **extra, "versions": _versions()}
    if WRITE_FLAG in sys.argv:
        RESULTS_DIR.mkdir(exist_ok=True)
        stored = {"benchmark": name, **record, "hardware": _hardware(), "command": _command(), "date": _today()}
        (RESULTS_DIR / f"{name}.json").write_text(json.dumps(stored, indent=2) + "\n")
    print(json.dumps(record), flush=True)
    return record


def _rounded(number: float) -> float:
    return float(f"{number:.6g}")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for distribution in DISTRIBUTIONS:
        try:
            versions[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return versions


def _hardware() -> dict[str, object]:
    """Processor, cores and memory of this machine, and its GPU where torch is loaded and sees one."""
    hardware: dict[str, object] = {"processor": _processor(), "cores": os.cpu_count()}
    if hasattr(os, "sysconf"):
        hardware["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
    return hardware


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return " ".join([model, *(flag for flag in ("avx2", "avx512f", "amx_tile") if flag in flags)])


def _command() -> str:
    program = sys.modules["__main__"].__spec__
    return " ".join([*(["python", "-m", program.name] if program else sys.argv[:1]), *sys.argv[1:]])


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
